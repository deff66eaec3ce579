"""A kubelet's device manager for tests: registers plugins, listens to them, allocates, misbehaves.

It follows the kubelet's order: on start it deletes every socket in its folder and creates its own;
it answers a registration only after it has connected to the plugin; the last message of a plugin
replaces earlier ones; when a stream ends, the resource counts as unhealthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from flyer_node.proto import deviceplugin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["FakeKubelet", "Plugin", "call"]

SERVICE = "/v1beta1.DevicePlugin/"
REQUESTS: dict[str, tuple[Any, Any]] = {
    "GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
    "ListAndWatch": (pb.Empty, pb.ListAndWatchResponse),
    "GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
    "Allocate": (pb.AllocateRequest, pb.AllocateResponse),
    "PreStartContainer": (pb.PreStartContainerRequest, pb.PreStartContainerResponse),
}
DIAL_SECONDS = 10.0
"""The kubelet's own deadline for dialling back."""


async def call(
    channel: grpc.aio.Channel, method: str, request: Any, timeout_seconds: float = 30.0
) -> Any:
    """One call of the plugin's service; `request` may be raw bytes, however broken."""
    raw = request if isinstance(request, bytes) else request.SerializeToString()
    stub: Any = channel.unary_unary(
        SERVICE + method,
        request_serializer=lambda data: data,
        response_deserializer=REQUESTS[method][1].FromString,
    )
    return await stub(raw, timeout=timeout_seconds)


@dataclass
class Plugin:
    """One registered resource."""

    resource: str
    endpoint: str
    channel: grpc.aio.Channel
    options: pb.DevicePluginOptions
    devices: dict[str, pb.Device] = field(default_factory=dict)
    messages: int = 0
    connected: bool = True
    stream: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> set[str]:
        """Ids that count as allocatable."""
        if not self.connected:
            return set()
        return {device.ID for device in self.devices.values() if device.health == "Healthy"}


class FakeKubelet:
    """A device manager at `folder`/kubelet.sock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "kubelet.sock"
        self.plugins: dict[str, Plugin] = {}
        self.registrations: list[tuple[float, str]] = []
        self.allocated: dict[str, dict[str, set[str]]] = {}
        """By resource and container."""
        self.refuse_next = 0
        """The number of registrations to refuse, as by a kubelet that is still starting."""
        self.delay_seconds = 0.0
        """Before it dials back."""
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()
        self._generation = 0

    async def start(self) -> None:
        """As at boot: the folder is cleaned of sockets, then the kubelet's own is made."""
        self.wipe()
        self._generation += 1
        self._server = grpc.aio.server()
        register = grpc.unary_unary_rpc_method_handler(
            self._register,
            request_deserializer=pb.RegisterRequest.FromString,
            response_serializer=pb.Empty.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(
            "v1beta1.Registration", {"Register": register}
        )
        self._server.add_generic_rpc_handlers((handler,))
        # Under another name first: a gRPC server that ends deletes the name that it bound.
        private = self.folder / f".kubelet{self._generation}"
        self._server.add_insecure_port(f"unix:{private}")
        await self._server.start()
        private.rename(self.socket)

    async def stop(self) -> None:
        """As when the process dies: streams end, the socket stays behind, dead."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=None)
        plugins, self.plugins = list(self.plugins.values()), {}
        for plugin in plugins:
            await self._forget(plugin)

    async def restart(self) -> None:
        """Restart. Allocations of containers are kept, as in the kubelet's checkpoint file."""
        await self.stop()
        await self.start()

    def wipe(self) -> None:
        """Deletes every socket in the folder."""
        for path in self.folder.iterdir():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()

    async def cut_stream(self, resource: str) -> None:
        """Ends the list of one resource, as a kubelet that lost its connection does."""
        await self._forget(self.plugins[resource])
        self._notify()

    async def until(
        self,
        condition: Callable[[], object],
        timeout_seconds: float = 60.0,
        description: str = "",
    ) -> float:
        """Waits until something holds; how long it took."""
        started = time.monotonic()
        deadline = started + timeout_seconds
        while not condition():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                state = {name: len(plugin.healthy) for name, plugin in self.plugins.items()}
                raise AssertionError(
                    f"not within {timeout_seconds} s: {description}; healthy: {state}"
                )
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                # Some conditions depend on files, not on messages: poll.
                async with asyncio.timeout(min(remaining, 0.05)):
                    await changed.wait()
        return time.monotonic() - started

    def healthy(self, resource: str) -> set[str]:
        """Allocatable ids of a resource."""
        plugin = self.plugins.get(resource)
        return plugin.healthy if plugin else set()

    def free(self, resource: str) -> list[str]:
        """Allocatable ids that no container holds."""
        allocated = set().union(*self.allocated.get(resource, {}).values())
        return sorted(self.healthy(resource) - allocated)

    async def admit(
        self, resource: str, container: str, count: int, must: Iterable[str] = ()
    ) -> pb.ContainerAllocateResponse:
        """Gives a container devices: preferred allocation first, then Allocate."""
        plugin = self.plugins[resource]
        available = self.free(resource)
        assert len(available) >= count, f"{resource}: {count} asked, {len(available)} free"
        selection = available[:count]
        if plugin.options.get_preferred_allocation_available:
            question = pb.PreferredAllocationRequest()
            question.container_requests.add(
                available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=count
            )
            answer = await call(plugin.channel, "GetPreferredAllocation", question)
            selection = list(answer.container_responses[0].deviceIDs)
            assert len(selection) == count
            assert set(selection) <= set(available), "the plugin chose what was not offered"
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=selection)
        response: pb.AllocateResponse = await call(plugin.channel, "Allocate", request)
        self.allocated.setdefault(resource, {})[container] = set(selection)
        return response.container_responses[0]

    def release(self, container: str) -> None:
        """The container ended."""
        for holders in self.allocated.values():
            holders.pop(container, None)

    async def _register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Empty:
        if self.refuse_next:
            self.refuse_next -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        assert request.version == "v1beta1"
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        channel = grpc.aio.insecure_channel(
            f"unix:{self.folder / request.endpoint}",
            options=[("grpc.use_local_subchannel_pool", 1)],
        )
        options = await call(channel, "GetDevicePluginOptions", pb.Empty(), DIAL_SECONDS)
        old = self.plugins.get(request.resource_name)
        if old is not None:
            await self._forget(old)
        plugin = Plugin(request.resource_name, request.endpoint, channel, options)
        self.plugins[request.resource_name] = plugin
        plugin.stream = asyncio.create_task(self._listen(plugin))
        self.registrations.append((time.monotonic(), request.resource_name))
        self._notify()
        return pb.Empty()

    async def _listen(self, plugin: Plugin) -> None:
        stub = plugin.channel.unary_stream(
            SERVICE + "ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        try:
            async for message in stub(pb.Empty()):
                plugin.devices = {device.ID: device for device in message.devices}
                plugin.messages += 1
                self._notify()
        except grpc.aio.AioRpcError:
            pass
        finally:
            plugin.connected = False
            self._notify()

    async def _forget(self, plugin: Plugin) -> None:
        plugin.connected = False
        if plugin.stream is not None:
            plugin.stream.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await plugin.stream
        # Calls in progress end first, as in the kubelet.
        await plugin.channel.close(grace=2.0)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

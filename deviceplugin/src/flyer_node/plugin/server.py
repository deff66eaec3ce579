"""One resource's gRPC service on one UNIX socket.

Requests of the kubelet are untrusted: a message that is malformed, too large or invalid gets a gRPC
error code, is counted, and changes nothing. Allocate answers from the newest snapshot and stores no
allocations, because the interface has no call that releases a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message

from flyer_node.errors import RequestError, SettingError
from flyer_node.proto import deviceplugin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from flyer_node.metrics import Metrics
    from flyer_node.plugin.device_lists import DeviceLists
    from flyer_node.plugin.resources import Allocation

__all__ = ["METHODS", "ResourceServer"]

SERVICE = "v1beta1.DevicePlugin"
METHODS = (
    "GetDevicePluginOptions",
    "ListAndWatch",
    "GetPreferredAllocation",
    "Allocate",
    "PreStartContainer",
)
REQUEST_BYTES_MAX = 1 << 20
"""Maximum size of a request; the largest of a kubelet is about 100 KB (all slots of a node)."""
WIRE_BYTES_MAX = 8 << 20
"""Limit of gRPC itself, which refuses larger requests with the same code and without a count."""
CONTAINERS_MAX = 64
IDS_MAX = 8192
STREAMS_MAX = 8
"""ListAndWatch streams of one resource: a kubelet has one, two while it reconnects."""
CALLS_MAX = 64
SOCKET_PATH_MAX = 107
"""Bytes of sun_path."""


class ResourceServer:
    """Serves one resource; may be started again after its socket was deleted."""

    def __init__(
        self, name: str, folder: Path, device_lists: DeviceLists, metrics: Metrics
    ) -> None:
        self.name = name
        self.endpoint = f"flyer-{name.replace('/', '-').replace('.', '-')}.sock"
        self.socket = folder / self.endpoint
        self.streams = 0
        self._device_lists = device_lists
        self._metrics = metrics
        self._server: grpc.aio.Server | None = None
        self._closing = asyncio.Event()
        self._identity: tuple[int, int] | None = None
        self._generation = 0

    @property
    def intact(self) -> bool:
        """Whether the socket at our path is still the one that we listen on."""
        return self._identity is not None and _identity(self.socket) == self._identity

    async def start(self) -> None:
        """Listens; an old socket at the path is replaced in one step.

        It is bound under a temporary name and renamed: when gRPC stops, it deletes the name that it
        bound, which must never be the name of the next server.
        """
        await self.stop()
        self._generation += 1
        private = self.socket.with_name(f".{self.endpoint}.{os.getpid()}.{self._generation}")
        if len(os.fsencode(private)) > SOCKET_PATH_MAX:
            expected = f"a folder whose sockets' paths stay under {SOCKET_PATH_MAX} bytes"
            raise SettingError("--plugin-folder", str(self.socket.parent), expected)
        with contextlib.suppress(FileNotFoundError):
            private.unlink()
        self._closing = asyncio.Event()
        server = grpc.aio.server(
            maximum_concurrent_rpcs=CALLS_MAX,
            options=[("grpc.max_receive_message_length", WIRE_BYTES_MAX)],
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._handlers()),)
        )
        server.add_insecure_port(f"unix:{private}")
        await server.start()
        private.rename(self.socket)
        self._identity = _identity(self.socket)
        self._server = server

    async def stop(self) -> None:
        """Ends all streams and removes the socket, if it is still ours."""
        self._closing.set()
        if self.intact:
            with contextlib.suppress(FileNotFoundError):
                self.socket.unlink()
        self._identity = None
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=0.2)

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        def unary(
            method: str, kind: type[Message], answer: Callable[[Any], Message]
        ) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_unary_rpc_method_handler(
                self._counted(method, answer),
                request_deserializer=lambda raw: _read(kind, raw),
                response_serializer=lambda message: message.SerializeToString(),
            )

        return {
            METHODS[0]: unary(METHODS[0], pb.Empty, self._options),
            METHODS[1]: grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                request_deserializer=lambda raw: _read(pb.Empty, raw),
                response_serializer=lambda message: message.SerializeToString(),
            ),
            METHODS[2]: unary(METHODS[2], pb.PreferredAllocationRequest, self._preferred),
            METHODS[3]: unary(METHODS[3], pb.AllocateRequest, self._allocate),
            METHODS[4]: unary(METHODS[4], pb.PreStartContainerRequest, self._pre_start),
        }

    def _counted(
        self, method: str, answer: Callable[[Any], Message]
    ) -> Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Message]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
            started = time.perf_counter()
            code, text = "OK", ""
            try:
                return answer(_valid(request))
            except RequestError as error:
                code, text = error.code, str(error)
            except Exception as error:  # noqa: BLE001 - a bug in the agent must not look like a hang
                code, text = "INTERNAL", f"{self.name} {method}: {type(error).__name__}: {error}"
            finally:
                self._metrics.request(self.name, method, code, time.perf_counter() - started)
            return await context.abort(grpc.StatusCode[code], text)

        return call

    def _options(self, _: pb.Empty) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def _list_and_watch(
        self, request: pb.Empty | RequestError, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        method = METHODS[1]
        if isinstance(request, RequestError):
            self._metrics.request(self.name, method, request.code)
            await context.abort(grpc.StatusCode[request.code], str(request))
        if self.streams >= STREAMS_MAX:
            self._metrics.request(self.name, method, "RESOURCE_EXHAUSTED")
            text = f"{self.name}: {STREAMS_MAX} streams are open already; close one"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._metrics.request(self.name, method, "OK")
        self.streams += 1
        try:
            async for devices in self._device_lists.lists(self.name, self._closing):
                message = pb.ListAndWatchResponse()
                for device in devices:
                    health = "Healthy" if device.healthy else "Unhealthy"
                    line = message.devices.add(ID=device.id, health=health)
                    if device.numa_node is not None:
                        line.topology.nodes.add(ID=device.numa_node)
                yield message
        finally:
            self.streams -= 1

    def _preferred(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        resource = self._device_lists.resource(self.name)
        for container in _containers(self.name, request.container_requests):
            _check_length(
                self.name, container.available_deviceIDs, container.must_include_deviceIDs
            )
            selection = resource.preferred(
                container.available_deviceIDs,
                container.must_include_deviceIDs,
                container.allocation_size,
            )
            response.container_responses.add(deviceIDs=selection)
        return response

    def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        response = pb.AllocateResponse()
        resource = self._device_lists.resource(self.name)
        for container in _containers(self.name, request.container_requests):
            _check_length(self.name, container.devices_ids)
            response.container_responses.append(_answer(resource.allocate(container.devices_ids)))
        return response

    def _pre_start(self, _: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        """The kubelet does not call it: `GetDevicePluginOptions` does not request it."""
        return pb.PreStartContainerResponse()


def _read(kind: type[Message], raw: bytes) -> Message | RequestError:
    """The request, or why it cannot be one; never an exception, which gRPC would not count."""
    if len(raw) > REQUEST_BYTES_MAX:
        text = f"a request of {len(raw)} bytes; at most {REQUEST_BYTES_MAX} are read"
        return RequestError("RESOURCE_EXHAUSTED", text)
    try:
        return kind.FromString(raw)
    except DecodeError:
        return RequestError("INVALID_ARGUMENT", f"{len(raw)} bytes that are not a {kind.__name__}")


def _valid(request: Any) -> Any:
    """The request that could be read; raises why it could not."""
    if isinstance(request, RequestError):
        raise request
    return request


def _containers(resource: str, requests: Any) -> Any:
    if not 0 < len(requests) <= CONTAINERS_MAX:
        text = f"{resource}: {len(requests)} container requests; 1 to {CONTAINERS_MAX} are read"
        raise RequestError("INVALID_ARGUMENT", text)
    return requests


def _check_length(resource: str, *lists: Any) -> None:
    longest = max(len(device_list) for device_list in lists)
    if longest > IDS_MAX:
        text = f"{resource}: {longest} device ids in one request; at most {IDS_MAX} are read"
        raise RequestError("RESOURCE_EXHAUSTED", text)


def _answer(allocate: Allocation) -> pb.ContainerAllocateResponse:
    answer = pb.ContainerAllocateResponse(envs=allocate.environment)
    for container_path, host_path in allocate.device_nodes:
        answer.devices.add(container_path=container_path, host_path=host_path, permissions="rw")
    for container_path, host_path in allocate.mounts:
        answer.mounts.add(container_path=container_path, host_path=host_path, read_only=True)
    for name in allocate.cdi_devices:
        answer.cdi_devices.add(name=name)
    return answer


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a socket; None if there is none."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if stat.S_ISSOCK(info.st_mode) else None

"""Kubelet registration: keeps all resources registered across kubelet restarts.

A kubelet that starts deletes all sockets in its folder, creates its own and has no registrations.
The registrar therefore checks three conditions after every change of the folder and every second:
the plugin's socket is unchanged, the kubelet's socket is the one of the registration, and the
kubelet still reads the device list. It restores failed ones, one resource at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog

from flyer_node.plugin.server import ResourceServer
from flyer_node.plugin.watch import FolderWatch
from flyer_node.proto import deviceplugin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flyer_node.metrics import Metrics
    from flyer_node.plugin.device_lists import DeviceLists

__all__ = ["Registrar"]

VERSION = "v1beta1"
POLL_SECONDS = 1.0
REGISTER_SECONDS = 5.0
"""Deadline of one registration; the kubelet dials back within it."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.1, 5.0
NO_STREAM_SECONDS, NO_STREAM_SECONDS_MAX = 3.0, 60.0
"""Time without a ListAndWatch stream after which a resource registers again."""

log = structlog.get_logger()


@dataclass
class _Registration:
    """State of the registration of one resource."""

    server: ResourceServer
    kubelet: tuple[int, int, int] | None = None
    """The kubelet's socket at which it is registered."""
    next_try: float = 0.0
    retry: float = RETRY_SECONDS
    no_stream_since: float | None = None
    no_stream_seconds: float = NO_STREAM_SECONDS


class Registrar:
    """Owns the servers of all resources."""

    def __init__(
        self, folder: Path, resources: Sequence[str], device_lists: DeviceLists, metrics: Metrics
    ) -> None:
        self._folder = folder
        self._kubelet_socket = folder / "kubelet.sock"
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._seen: tuple[int, int, int] | None = None
        self._registrations = [
            _Registration(ResourceServer(name, folder, device_lists, metrics)) for name in resources
        ]

    @property
    def registered(self) -> bool:
        """Whether all resources are registered at the kubelet that is there now."""
        kubelet = self._kubelet()
        return kubelet is not None and all(
            registration.kubelet == kubelet for registration in self._registrations
        )

    async def run(self) -> None:
        """Runs until cancelled; then removes the sockets, which the kubelet detects immediately."""
        watch = FolderWatch(self._folder, self._wake.set)
        try:
            while True:
                watch.renew()
                self._wake.clear()
                pause = await self._reconcile()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        finally:
            watch.close()
            stops = (registration.server.stop() for registration in self._registrations)
            await asyncio.gather(*stops, return_exceptions=True)

    async def _reconcile(self) -> float:
        """One look at everything; how long to wait for the next."""
        if not self._folder.is_dir():
            return POLL_SECONDS
        kubelet = self._kubelet()
        if kubelet is not None and self._seen is not None and kubelet != self._seen:
            self._metrics.kubelet_restarts.inc()
            log.info("kubelet restarted", socket=str(self._kubelet_socket))
        self._seen = kubelet or self._seen
        await asyncio.gather(
            *(
                self._reconcile_resource(registration, kubelet)
                for registration in self._registrations
            )
        )
        now = time.monotonic()
        waits = [
            registration.next_try - now
            for registration in self._registrations
            if registration.kubelet != kubelet
        ]
        return max(0.01, min(POLL_SECONDS, *waits)) if waits and kubelet else POLL_SECONDS

    async def _reconcile_resource(
        self, registration: _Registration, kubelet: tuple[int, int, int] | None
    ) -> None:
        if not registration.server.intact:
            if registration.kubelet is not None:
                log.info("socket was deleted; serving again", resource=registration.server.name)
            registration.kubelet = None
            registration.next_try = 0.0
            try:
                await registration.server.start()
            except OSError as error:
                log.warning("cannot serve", resource=registration.server.name, error=str(error))
                return
        if kubelet is None:
            registration.kubelet = None
            return
        self._check_stream(registration)
        if registration.kubelet == kubelet or time.monotonic() < registration.next_try:
            return
        await self._register(registration, kubelet)

    def _check_stream(self, registration: _Registration) -> None:
        """A registration without a listener is none."""
        now = time.monotonic()
        if registration.kubelet is None or registration.server.streams:
            registration.no_stream_since = None
            if registration.server.streams:
                registration.no_stream_seconds = NO_STREAM_SECONDS
            return
        registration.no_stream_since = registration.no_stream_since or now
        if now - registration.no_stream_since >= registration.no_stream_seconds:
            log.info(
                "kubelet does not listen; registering again", resource=registration.server.name
            )
            registration.kubelet, registration.no_stream_since = None, None
            registration.no_stream_seconds = min(
                NO_STREAM_SECONDS_MAX, registration.no_stream_seconds * 2
            )

    async def _register(self, registration: _Registration, kubelet: tuple[int, int, int]) -> None:
        request = pb.RegisterRequest(
            version=VERSION,
            endpoint=registration.server.endpoint,
            resource_name=registration.server.name,
            options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
        )
        started = time.monotonic()
        try:
            # A separate channel for each try: a failed one backs off before it dials again.
            async with grpc.aio.insecure_channel(
                f"unix:{self._kubelet_socket}", options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                register = channel.unary_unary(
                    "/v1beta1.Registration/Register",
                    request_serializer=pb.RegisterRequest.SerializeToString,
                    response_deserializer=pb.Empty.FromString,
                )
                await register(request, timeout=REGISTER_SECONDS)
        except grpc.aio.AioRpcError as error:
            registration.next_try = time.monotonic() + registration.retry
            registration.retry = min(RETRY_SECONDS_MAX, registration.retry * 2)
            self._metrics.registration(registration.server.name, ok=False)
            log.warning(
                "registration failed",
                resource=registration.server.name,
                code=error.code().name,
                detail=error.details(),
            )
            return
        registration.kubelet, registration.retry, registration.no_stream_since = (
            kubelet,
            RETRY_SECONDS,
            None,
        )
        self._metrics.registration(registration.server.name, ok=True)
        seconds = round(time.monotonic() - started, 4)
        log.info("registered", resource=registration.server.name, seconds=seconds)

    def _kubelet(self) -> tuple[int, int, int] | None:
        """Identity of the kubelet's socket. Inode numbers are reused, so it includes the time."""
        try:
            info = self._kubelet_socket.lstat()
        except OSError:
            return None
        return info.st_dev, info.st_ino, info.st_mtime_ns

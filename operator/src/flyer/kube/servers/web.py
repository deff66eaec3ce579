"""HTTP server with bounded connections, timeouts and body sizes; aiohttp parses.

Every stage has a deadline: TLS handshake, request head (aiohttp's keep-alive timer starts at accept
and only a complete head stops it), body, response.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from flyer.kube.servers.accept import Accepted, BoundedListener
from flyer.kube.servers.connection_limits import ConnectionLimitSettings
from flyer.kube.servers.tls import accept_tls

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from flyer.kube.servers.connection_limits import ConnectionSlot

__all__ = ["BodyTooLargeError", "WebServer", "WebSettings", "read_body", "slot_of"]


class BodyTooLargeError(Exception):
    """The request's body exceeds its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """Times in seconds."""

    limits: ConnectionLimitSettings = field(
        default_factory=lambda: ConnectionLimitSettings(
            total_max=64, source_max=32, rate_per_second=50.0, burst=100
        )
    )
    head_seconds: float = 5.0
    """Deadline of the TLS handshake, and of each request head after the previous response."""
    answer_seconds: float = 5.0
    """Deadline from the request head to the complete response, including the body."""
    head_bytes_max: int = 8190
    """Maximum size of a line of the request head."""


class _Protocol(RequestHandler):
    """One connection, with its slot and a future for its end."""

    __slots__ = ("closed", "slot")

    def __init__(self, server: web.Server, slot: ConnectionSlot, settings: WebSettings) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=settings.head_seconds,
            access_log=None,  # type: ignore[arg-type]
            lingering_time=0.0,
            max_line_size=settings.head_bytes_max,
            max_field_size=settings.head_bytes_max,
        )
        self.slot = slot
        self.closed: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)


class WebServer:
    """Serves `handle` until cancelled."""

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        settings: WebSettings,
        *,
        context: ssl.SSLContext | None = None,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._handle = handle
        self._settings = settings
        self._context = context
        self._server: web.Server | None = None
        self._listener = BoundedListener(
            self._serve,
            settings.limits,
            connections_max=settings.limits.total_max,
            refused=refused,
        )

    @property
    def port(self) -> int:
        """The bound port."""
        return self._listener.port

    def open(self, host: str, port: int) -> None:
        """Bind and listen."""
        self._listener.open(host, port)

    async def run(self) -> None:
        """Serve until cancelled."""
        self._server = web.Server(self._answer)
        await self._listener.run()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._settings.answer_seconds):
                return await self._handle(request)
        except TimeoutError:
            response = web.Response(status=408, text="the request took too long\n")
        except BodyTooLargeError as error:
            response = web.Response(status=413, text=f"{error}\n")
        response.force_close()
        return response

    async def _serve(self, accepted: Accepted) -> None:
        assert self._server is not None, "not running"
        protocol = _Protocol(self._server, accepted.slot, self._settings)
        try:
            if self._context is None:
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: protocol, accepted.socket)
            else:
                seconds = self._settings.head_seconds
                await accept_tls(
                    accepted.socket, self._context, protocol, handshake_seconds=seconds
                )
            await protocol.closed
        except OSError:
            pass  # no TLS, or the peer disconnected
        finally:
            if protocol.transport is not None:
                protocol.transport.abort()


def slot_of(request: web.BaseRequest) -> ConnectionSlot:
    """The slot of the request's connection."""
    protocol = request.protocol
    assert isinstance(protocol, _Protocol), protocol
    return protocol.slot


async def read_body(request: web.BaseRequest, bytes_max: int) -> bytes:
    """Read the whole body; a larger one is refused before it is in memory."""
    length = request.content_length
    if length is not None and length > bytes_max:
        raise BodyTooLargeError(f"body of {length} bytes exceeds the limit of {bytes_max}")
    parts = bytearray()
    async for part in request.content.iter_any():
        parts += part
        if len(parts) > bytes_max:
            raise BodyTooLargeError(f"body exceeds {bytes_max} bytes")
    return bytes(parts)

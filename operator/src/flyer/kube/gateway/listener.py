"""TLS and first line of accepted connections; `flyer.kube.servers` has the connection limits."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from flyer.kube.gateway.stream import RefusedError, Stream
from flyer.kube.servers.accept import Accepted, BoundedListener
from flyer.kube.servers.tls import accept_tls
from flyer.sidecar.wire import REPORT_BYTES_MAX

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from flyer.kube.gateway.metrics import GatewayMetrics
    from flyer.kube.gateway.settings import GatewaySettings

__all__ = ["Connection", "Listener"]

log = logging.getLogger(__name__)


class Connection:
    """A connection after its TLS handshake."""

    def __init__(self, accepted: Accepted, stream: Stream) -> None:
        self.stream = stream
        self._accepted = accepted

    @property
    def source(self) -> str:
        """The source to which its slot is charged."""
        return self._accepted.slot.source

    @property
    def expected(self) -> bool:
        """Whether its source is the address of an expected pod."""
        return self._accepted.slot.expected

    def busy(self) -> None:
        """Its token is being reviewed: it can no longer be evicted."""
        self._accepted.slot.busy = True

    def authenticated(self) -> None:
        """Its pod is known: it no longer counts as unauthenticated."""
        self._accepted.authenticated()


class _Protocol(asyncio.StreamReaderProtocol):
    """Stores its transport."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TLS handshake is complete."""
        assert isinstance(transport, asyncio.Transport), transport
        self.transport = transport
        super().connection_made(transport)


class Listener:
    """Accepts connections until cancelled; each is a task with deadlines."""

    def __init__(
        self,
        settings: GatewaySettings,
        context: ssl.SSLContext,
        metrics: GatewayMetrics,
        serve: Callable[[Connection], Awaitable[None]],
        expected: Callable[[str], bool],
    ) -> None:
        self._settings = settings
        self._context = context
        self._metrics = metrics
        self._serve = serve
        self._bounded = BoundedListener(
            self._handle,
            settings.limits,
            connections_max=settings.connections_max,
            expected=expected,
            refused=metrics.refusals.labels("too_many").inc,
            changed=metrics.sockets.set,
        )

    @property
    def port(self) -> int:
        """The bound port; 0 before `open`."""
        return self._bounded.port

    @property
    def unauthenticated(self) -> int:
        """Connections that have not authenticated."""
        return len(self._bounded.limits)

    def open(self) -> None:
        """Bind and listen."""
        self._bounded.open(self._settings.host, self._settings.port)

    async def run(self) -> None:
        """Accept."""
        await self._bounded.run()

    async def _handle(self, accepted: Accepted) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=REPORT_BYTES_MAX, loop=loop)
        protocol = _Protocol(reader, loop=loop)
        try:
            accepted.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await accept_tls(
                accepted.socket,
                self._context,
                protocol,
                handshake_seconds=self._settings.hello_seconds,
            )
            assert protocol.transport is not None, "the handshake is over"
            writer = asyncio.StreamWriter(protocol.transport, protocol, reader, loop)
            stream = Stream(reader, writer, self._settings, self._metrics)
            await self._serve_stream(Connection(accepted, stream), accepted.address)
        except (OSError, TimeoutError) as error:
            if protocol.transport is None:
                self._metrics.refusals.labels("bad_handshake").inc()
            log.debug("gateway: %s: %r", accepted.address, error)
        finally:
            if protocol.transport is not None:
                protocol.transport.abort()

    async def _serve_stream(self, connection: Connection, address: str) -> None:
        try:
            await self._serve(connection)
        except RefusedError as error:
            if error.code:
                self._metrics.refusals.labels(error.code).inc()
                # Any client can cause these, in any number: a metric counts them.
                log.debug("gateway: %s refused: %s: %s", address, error.code, error)
            await connection.stream.refuse(error)

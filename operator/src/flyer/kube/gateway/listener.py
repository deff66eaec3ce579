"""Accepting connections: limits before anything is read, TLS, and only then the first line.

Connections are counted from accept(2) on, so that those who never finish a handshake count too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from typing import TYPE_CHECKING, Final

from flyer.kube.gateway.stream import RefusedError, Stream
from flyer.sidecar.wire import REPORT_BYTES_MAX

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from flyer.kube.gateway.metrics import GatewayMetrics
    from flyer.kube.gateway.settings import GatewaySettings

__all__ = ["Connection", "Listener"]

BACKLOG: Final = 1024
OUT_OF_DESCRIPTORS_SECONDS: Final = 0.2

log = logging.getLogger(__name__)


class Connection:
    """A connection, a stranger's until it has proved whose it is."""

    def __init__(self, address: str, strangers: Counter[str]) -> None:
        self.address = address
        self.stream: Stream
        self._strangers = strangers
        self._is_stranger = True
        strangers[address] += 1

    def proved(self) -> None:
        """It is known who this is (or it has left): it counts as a stranger no more."""
        if self._is_stranger:
            self._is_stranger = False
            self._strangers[self.address] -= 1
            if self._strangers[self.address] <= 0:
                del self._strangers[self.address]


class Listener:
    """Accepts until cancelled; every connection is a task that ends within its deadlines."""

    def __init__(
        self,
        settings: GatewaySettings,
        context: ssl.SSLContext,
        metrics: GatewayMetrics,
        serve: Callable[[Connection], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._context = context
        self._metrics = metrics
        self._serve = serve
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: Counter[str] = Counter()

    @property
    def port(self) -> int:
        """Where it listens; 0 before `open`."""
        return int(self._socket.getsockname()[1]) if self._socket else 0

    def open(self) -> None:
        """Bind and listen."""
        host, six = self._settings.host, ":" in self._settings.host
        self._socket = socket.create_server(
            (host, self._settings.port),
            family=socket.AF_INET6 if six else socket.AF_INET,
            dualstack_ipv6=six and socket.has_dualstack_ipv6(),
            backlog=BACKLOG,
        )
        self._socket.setblocking(False)

    async def run(self) -> None:
        """Accept."""
        assert self._socket is not None, "open it first"
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._socket)
                except OSError as error:  # out of descriptors, or the peer was faster
                    log.warning("gateway: accept: %s", error)
                    await asyncio.sleep(OUT_OF_DESCRIPTORS_SECONDS)
                    continue
                self._admit(connection, str(address[0]))
        finally:
            self._socket.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, connection: socket.socket, address: str) -> None:
        limits = self._settings
        if (
            len(self._tasks) >= limits.connections_max
            or self._strangers.total() >= limits.strangers_max
            or self._strangers[address] >= limits.strangers_per_address_max
        ):
            self._metrics.refusals.labels("too_many").inc()
            connection.close()  # there is no TLS yet in which to say why
            return
        one = Connection(address, self._strangers)
        task = asyncio.get_running_loop().create_task(self._handle(connection, one))
        self._tasks.add(task)
        self._metrics.sockets.set(len(self._tasks))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._metrics.sockets.set(len(self._tasks))
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("gateway: a connection's task failed", exc_info=error)

    async def _handle(self, connection: socket.socket, one: Connection) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=REPORT_BYTES_MAX, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        writer: asyncio.StreamWriter | None = None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._settings.hello_seconds,
                ssl_shutdown_timeout=1.0,
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            one.stream = Stream(reader, writer, self._settings, self._metrics)
            await self._converse(one)
        except (OSError, TimeoutError) as error:
            if writer is None:
                self._metrics.refusals.labels("bad_handshake").inc()
            log.debug("gateway: %s: %r", one.address, error)
        finally:
            one.proved()
            if writer is not None:
                writer.transport.abort()
            else:
                connection.close()

    async def _converse(self, one: Connection) -> None:
        try:
            await self._serve(one)
        except RefusedError as error:
            if error.code:
                self._metrics.refusals.labels(error.code).inc()
                log.info("gateway: %s refused: %s: %s", one.address, error.code, error)
            await one.stream.refuse(error)

"""Accept loop that applies `ConnectionLimits` before any byte is read or any TLS computed.

A connection counts from accept(2) on, so that a client that never finishes its handshake counts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flyer.kube.servers.connection_limits import (
    ConnectionLimits,
    ConnectionLimitSettings,
    ConnectionSlot,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Accepted", "BoundedListener"]

BACKLOG: Final = 1024
OUT_OF_DESCRIPTORS_SECONDS: Final = 0.2
ACCEPTS_PER_TURN: Final = 16
"""Connections accepted before other tasks of the loop run."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Accepted:
    """An accepted connection."""

    socket: socket.socket
    address: str
    slot: ConnectionSlot
    limits: ConnectionLimits

    def authenticated(self) -> None:
        """Release the slot: the connection authenticated or ended."""
        self.limits.release(self.slot)


class BoundedListener:
    """Accepts until cancelled. `serve` handles one connection in a task and must have deadlines."""

    def __init__(
        self,
        serve: Callable[[Accepted], Awaitable[None]],
        settings: ConnectionLimitSettings,
        *,
        connections_max: int,
        expected: Callable[[str], bool] = lambda _: False,
        refused: Callable[[], None] = lambda: None,
        changed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`refused` counts refused and evicted connections; `changed` gets the number open."""
        self.limits = ConnectionLimits(settings)
        self._serve = serve
        self._connections_max = connections_max
        self._expected = expected
        self._refused = refused
        self._changed = changed
        self._socket: socket.socket | None = None
        self._tasks: dict[asyncio.Task[None], Accepted] = {}
        self._by_slot: dict[ConnectionSlot, asyncio.Task[None]] = {}
        self._evicted: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The bound port; 0 before `open`."""
        return int(self._socket.getsockname()[1]) if self._socket else 0

    @property
    def _open(self) -> int:
        return len(self._tasks) - len(self._evicted)

    def open(self, host: str, port: int) -> None:
        """Bind and listen. An empty host: all addresses of both families."""
        six = ":" in host or (not host and socket.has_dualstack_ipv6())
        self._socket = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if six else socket.AF_INET,
            dualstack_ipv6=six and socket.has_dualstack_ipv6(),
            backlog=BACKLOG,
        )
        self._socket.setblocking(False)

    async def run(self) -> None:
        """Accept connections until cancelled."""
        assert self._socket is not None, "open it first"
        loop = asyncio.get_running_loop()
        accepted = 0
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._socket)
                except OSError as error:  # out of descriptors, or the peer closed the connection
                    log.warning("accept: %s", error)
                    await asyncio.sleep(OUT_OF_DESCRIPTORS_SECONDS)
                    continue
                self._admit(connection, str(address[0]))
                accepted += 1
                if accepted % ACCEPTS_PER_TURN == 0:
                    # sock_accept does not suspend while connections wait in the backlog.
                    await asyncio.sleep(0)
        finally:
            self._socket.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, connection: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        source = source_of(address)
        admission = self.limits.admit(source, loop.time(), expected=self._expected(address))
        if admission.evicted is not None:
            self._refused()
            task = self._by_slot.pop(admission.evicted, None)
            if task is not None:
                task.cancel()
                self._evicted.add(task)  # it ends as soon as it runs
        if admission.slot is None or self._open >= self._connections_max:
            if admission.slot is not None:
                self.limits.release(admission.slot)
            self._refused()
            connection.close()  # before TLS no reason can be sent
            return
        accepted = Accepted(connection, address, admission.slot, self.limits)
        task = loop.create_task(self._handle(accepted))
        self._tasks[task] = accepted
        self._by_slot[admission.slot] = task
        self._changed(self._open)
        task.add_done_callback(self._ended)

    async def _handle(self, accepted: Accepted) -> None:
        try:
            await self._serve(accepted)
        finally:
            accepted.authenticated()

    def _ended(self, task: asyncio.Task[None]) -> None:
        accepted = self._tasks.pop(task)
        self._by_slot.pop(accepted.slot, None)
        accepted.authenticated()
        accepted.socket.close()  # also if the task was cancelled before it ran
        self._evicted.discard(task)
        self._changed(self._open)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connection task failed", exc_info=error)

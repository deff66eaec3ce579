"""A few tasks at a time, shared fairly between sources: one with much work delays itself."""

from __future__ import annotations

import asyncio
import heapq
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["FairTurns"]


class FairTurns:
    """A semaphore whose waiters are served by weighted fair queueing.

    (Demers, Keshav and Shenker, "Analysis and Simulation of a Fair Queueing Algorithm", 1989.)
    Tasks of one source and one cost are a flow, served in order. The next one is that whose flow
    has been served least, its own cost included: what costs little comes before what costs much,
    but no number of cheap tasks of one source keeps an expensive one of another waiting for long.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._served = 0  # what each flow has had that never stopped waiting
        self._ends: dict[tuple[str, int], int] = {}  # by flow, of its last waiter
        self._waiting: list[tuple[int, int, tuple[str, int], asyncio.Future[None]]] = []
        self._asked = 0  # orders those that are alike

    @asynccontextmanager
    async def turn(self, source: str, cost: int = 1) -> AsyncIterator[None]:
        """Hold one of the places; the caller bounds the wait."""
        if not self._free:
            future = self._wait(source, cost)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._next()  # the place was handed to this task as it was cancelled
                raise
        else:
            self._free -= 1
        try:
            yield
        finally:
            self._next()

    def _wait(self, source: str, cost: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flow = source, cost
        end = self._ends[flow] = max(self._served, self._ends.get(flow, 0)) + cost
        self._asked += 1
        heapq.heappush(self._waiting, (end, self._asked, flow, future))
        return future

    def _next(self) -> None:
        while self._waiting:
            end, _, flow, future = heapq.heappop(self._waiting)
            if self._ends[flow] == end:
                del self._ends[flow]  # nothing more of it waits
            if not future.done():
                self._served = end
                future.set_result(None)  # the place is handed over
                return
        self._free += 1

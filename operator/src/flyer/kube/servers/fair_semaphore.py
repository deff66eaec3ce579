"""Fair semaphore: bounds concurrent tasks and shares them fairly between sources."""

from __future__ import annotations

import asyncio
import heapq
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["FairSemaphore"]


class FairSemaphore:
    """A semaphore whose waiters are served by weighted fair queueing.

    (Demers, Keshav and Shenker, "Analysis and Simulation of a Fair Queueing Algorithm", 1989.)
    Tasks of one source and one cost form a flow, served in order. The next task is the one whose
    flow has received the least service, including the task's own cost: cheap tasks come before
    expensive ones, but no number of cheap tasks of one source delays another source's expensive
    task for long.
    """

    def __init__(self, limit: int = 1) -> None:
        self._free = limit
        self._served = 0  # virtual time: the service of a flow that has always had waiters
        self._ends: dict[tuple[str, int], int] = {}  # by flow: finish time of its last waiter
        self._waiting: list[tuple[int, int, tuple[str, int], asyncio.Future[None]]] = []
        self._asked = 0  # breaks ties by arrival

    @asynccontextmanager
    async def acquire(self, source: str, cost: int = 1) -> AsyncIterator[None]:
        """Acquire the semaphore; the caller bounds the wait."""
        if not self._free:
            future = self._wait(source, cost)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._next()  # acquired at the moment of cancellation: pass it on
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
                del self._ends[flow]  # the flow has no more waiters
            if not future.done():
                self._served = end
                future.set_result(None)  # passed on without being released
                return
        self._free += 1

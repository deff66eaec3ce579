"""A few tasks at a time, small ones first, sources in rotation: a large source delays itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["FairTurns"]


class FairTurns:
    """A semaphore. Waiters of the least cost are served first, and of them one of each source.

    Within a source and a cost they are served in order.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._waiting: dict[int, OrderedDict[str, deque[asyncio.Future[None]]]] = {}  # by cost

    @asynccontextmanager
    async def turn(self, source: str, cost: int = 0) -> AsyncIterator[None]:
        """Hold one of the places; the caller bounds the wait."""
        if not self._free:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            alike = self._waiting.setdefault(cost, OrderedDict())
            alike.setdefault(source, deque()).append(future)
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

    def _next(self) -> None:
        while self._waiting:
            future = self._first()
            if not future.done():
                future.set_result(None)  # the place is handed over
                return
        self._free += 1

    def _first(self) -> asyncio.Future[None]:
        cost = min(self._waiting)
        alike = self._waiting[cost]
        source, queue = alike.popitem(last=False)
        future = queue.popleft()
        if queue:
            alike[source] = queue  # behind the other sources
        if not alike:
            del self._waiting[cost]
        return future

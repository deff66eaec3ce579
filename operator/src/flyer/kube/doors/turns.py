"""A few tasks at a time, and sources in rotation: a source with many requests delays itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["FairTurns"]


class FairTurns:
    """A semaphore whose waiters are served round-robin by source, in order within a source."""

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, source: str) -> AsyncIterator[None]:
        """Hold one of the places; the caller bounds the wait."""
        if not self._free:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(source, deque()).append(future)
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
            source, queue = next(iter(self._waiting.items()))
            del self._waiting[source]
            future = queue.popleft()
            if queue:
                self._waiting[source] = queue  # behind the other sources
            if not future.done():
                future.set_result(None)  # the place is handed over
                return
        self._free += 1

"""Concurrency limiter with a lower limit while urgent work runs.

Bulk calls that can wait (the pods of gangs) leave the API server's capacity to urgent ones (commits
of decisions), without stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Limiter"]

_Queue = deque[asyncio.Future[None]]


class Limiter:
    """`async with` takes a slot; waiters are served in order of arrival.

    Waiters on `priority` come before all others, so that started work is finished first.
    """

    def __init__(self, limit: int, reduced_limit: int) -> None:
        assert 0 < reduced_limit <= limit, (reduced_limit, limit)
        self._limit = limit
        self._reduced_limit = reduced_limit
        self._urgent = 0
        self._active = 0
        self._priority_queue: _Queue = deque()
        self._queue: _Queue = deque()
        self.priority = _Priority(self)

    @contextlib.contextmanager
    def reduced(self) -> Iterator[None]:
        """Apply the lower limit while urgent work runs."""
        self._urgent += 1
        try:
            yield
        finally:
            self._urgent -= 1
            self._wake()

    async def __aenter__(self) -> None:
        await self._acquire(self._queue)

    async def __aexit__(self, *_: object) -> None:
        self._release()

    async def _acquire(self, queue: _Queue) -> None:
        if self._active < self._current_limit:  # no waiters: each release wakes them
            self._active += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release()  # acquired at the moment of cancellation: pass it on
            raise

    def _release(self) -> None:
        self._active -= 1
        self._wake()

    @property
    def _current_limit(self) -> int:
        return self._reduced_limit if self._urgent else self._limit

    def _wake(self) -> None:
        while self._active < self._current_limit and (queue := self._priority_queue or self._queue):
            waiter = queue.popleft()
            if not waiter.done():
                self._active += 1
                waiter.set_result(None)


class _Priority:
    """Slots of a limiter, with precedence over all other waiters."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    async def __aenter__(self) -> None:
        await self._limiter._acquire(self._limiter._priority_queue)

    async def __aexit__(self, *_: object) -> None:
        self._limiter._release()

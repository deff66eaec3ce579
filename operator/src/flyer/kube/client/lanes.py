"""A lane: so many calls at once, fewer while something else is urgent.

What is many and can wait (the pods of gangs) then leaves an API server's time to what others wait
for (the commits of decisions), without standing still.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Lane"]


class Lane:
    """`async with` takes one turn; turns come in the order in which they were asked for."""

    def __init__(self, wide: int, narrow: int) -> None:
        assert 0 < narrow <= wide, (narrow, wide)
        self._wide = wide
        self._narrow = narrow
        self._urgent = 0
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.contextmanager
    def narrowed(self) -> Iterator[None]:
        """Something urgent is under way."""
        self._urgent += 1
        try:
            yield
        finally:
            self._urgent -= 1
            self._wake()

    async def __aenter__(self) -> None:
        if not self._waiting and self._taken < self._width:
            self._taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                await self.__aexit__()  # it came together with our end: the next one's
            raise

    async def __aexit__(self, *_: object) -> None:
        self._taken -= 1
        self._wake()

    @property
    def _width(self) -> int:
        return self._narrow if self._urgent else self._wide

    def _wake(self) -> None:
        while self._waiting and self._taken < self._width:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)

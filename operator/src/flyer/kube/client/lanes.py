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

_Turns = deque[asyncio.Future[None]]


class Lane:
    """`async with` takes one turn; turns come in the order in which they were asked for.

    Turns of `ahead` come before all others: what was begun is finished first.
    """

    def __init__(self, wide: int, narrow: int) -> None:
        assert 0 < narrow <= wide, (narrow, wide)
        self._wide = wide
        self._narrow = narrow
        self._urgent = 0
        self._taken = 0
        self._first: _Turns = deque()
        self._others: _Turns = deque()
        self.ahead = _Ahead(self)

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
        await self._take(self._others)

    async def __aexit__(self, *_: object) -> None:
        self._give()

    async def _take(self, turns: _Turns) -> None:
        if self._taken < self._width:  # nobody waits: whoever gives a turn back wakes them
            self._taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give()  # it came together with our end: the next one's
            raise

    def _give(self) -> None:
        self._taken -= 1
        self._wake()

    @property
    def _width(self) -> int:
        return self._narrow if self._urgent else self._wide

    def _wake(self) -> None:
        while self._taken < self._width and (turns := self._first or self._others):
            turn = turns.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)


class _Ahead:
    """Turns of a lane before all others that wait."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    async def __aenter__(self) -> None:
        await self._lane._take(self._lane._first)

    async def __aexit__(self, *_: object) -> None:
        self._lane._give()

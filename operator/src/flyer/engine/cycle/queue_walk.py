"""Walk through the queue in order, which can skip the rest of a class."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from flyer.engine.state.queue import ClassKey, Contender, Queue


@dataclass(slots=True)
class _Cursor:
    """Position of a walk in a sorted list of contenders."""

    class_key: ClassKey | None
    members: Sequence[Contender]
    at: int = 0
    level: int | None = None  # instead of the members' level

    @property
    def next(self) -> Contender:
        place, key = self.members[self.at]
        return (place if self.level is None else (-self.level, *place[1:])), key


class Walk:
    """Iterator over the queue in order; `skip` leaves out the rest of a class."""

    def __init__(self, queue: Queue, contenders: Iterable[Contender]) -> None:
        self._heap: list[tuple[Contender, _Cursor]] = []
        self._last: _Cursor | None = None
        cursors = [_Cursor(class_key, members) for class_key, members in queue.classes.items()]
        cursors.append(_Cursor(None, queue.single))
        cursors += [_Cursor(None, (other,)) for other in contenders]
        self._heap = [(cursor.next, cursor) for cursor in cursors if cursor.members]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[tuple[Contender, ClassKey | None]]:
        while True:
            if self._last is not None:
                self._push(self._last)
                self._last = None
            if not self._heap:
                return
            contender, cursor = heapq.heappop(self._heap)
            cursor.at += 1
            self._last = cursor
            yield contender, cursor.class_key

    def put(self, contender: Contender) -> None:
        """Add a contender at a position at which the queue does not have it."""
        self._push(_Cursor(None, (contender,)))

    def lower(self, level: int) -> None:
        """Move the last contender and the rest of its class to this level."""
        assert self._last is not None, "no class"
        self._last.at -= 1
        self._last.level = level

    def skip(self) -> None:
        """Skip the rest of the class of the last contender."""
        self._last = None

    def _push(self, cursor: _Cursor) -> None:
        if cursor.at < len(cursor.members):
            heapq.heappush(self._heap, (cursor.next, cursor))


__all__ = ["Walk"]

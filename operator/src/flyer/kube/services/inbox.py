"""Events for the engine on their way there: some at once, some together with what follows them.

Each step may cost writes. What comes in bursts (acknowledgements, exits, nodes that fall empty or
join) waits a moment for the rest of its burst, so that a suspension costs two commits and not one
for each node. An event that somebody waits for takes along what has gathered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from flyer.engine import (
    CheckpointReported,
    LifeStateSet,
    LogObserved,
    NodeEmptied,
    NodeObserved,
    PodExited,
    ProgressReported,
    Released,
    SuspendReceived,
)

if TYPE_CHECKING:
    from flyer.engine import Event

__all__ = ["GATHER_SECONDS", "Inbox"]

GATHER_SECONDS: Final = 0.2
_PATIENT: Final = (
    CheckpointReported, LifeStateSet, LogObserved, NodeEmptied, NodeObserved, PodExited,
    ProgressReported, Released, SuspendReceived,
)  # fmt: skip


class Inbox:
    """A queue with one reader."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._emptied: set[NodeEmptied] = set()  # among the events
        self._due_at = float("inf")  # of the loop's clock
        self._changed = asyncio.Event()

    def tell(self, event: Event) -> None:
        """Queue a fact. That a node is empty is said again and again, and queued once."""
        if isinstance(event, NodeEmptied):
            if event in self._emptied:
                return
            self._emptied.add(event)
        delay_seconds = GATHER_SECONDS if isinstance(event, _PATIENT) else 0.0
        self._events.append(event)
        due_at = asyncio.get_running_loop().time() + delay_seconds
        if due_at < self._due_at:
            self._due_at = due_at
            self._changed.set()

    def keep(self, events: list[Event]) -> None:
        """Begin anew with these; they are due at once."""
        self._events = list(events)
        self._emptied.clear()
        self._due_at = 0.0
        self._changed.set()

    def take(self) -> list[Event]:
        """All that is queued."""
        events, self._events = self._events, []
        self._emptied.clear()
        self._due_at = float("inf")
        return events

    async def wait(self, seconds: float) -> None:
        """Until something is due, for so long at most."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        while (until := min(self._due_at, ends_at)) > loop.time():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                continue

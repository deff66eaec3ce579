"""Event log: appended to events.jsonl, kept in memory, sent to watchers.

An event's `reason` is stable and CamelCase, its `message` is for people, its `fields` are the
numbers of the message for programs. Sequence numbers continue over restarts of the driver.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from flyer.local.store import read_json_lines
from flyer.views import EventView, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flyer.local.store import Store

__all__ = ["EventLog"]

# The file has all events; memory has the recent ones that clients request.
EVENTS_KEPT_MAX: Final = 50_000


class EventLog:
    """Events of one cluster, in order."""

    def __init__(self, store: Store, publish: Callable[[EventView], None]) -> None:
        self._store = store
        self._publish = publish
        past = (from_json(EventView, record) for record in read_json_lines(store.paths.events))
        self._events: deque[EventView] = deque(past, EVENTS_KEPT_MAX)
        self._next = self._events[-1].sequence + 1 if self._events else 1

    def record(
        self,
        now: float,
        reason: str,
        message: str,
        *,
        job: str = "",
        attempt: int | None = None,
        node: str = "",
        warning: bool = False,
        fields: dict[str, Any] | None = None,
    ) -> EventView:
        """Record one event and send it to watchers."""
        kind = "Warning" if warning else "Normal"
        event = EventView(
            self._next, round(now, 3), kind, reason, message, job, attempt, node, fields or {}
        )
        self._next += 1
        self._events.append(event)
        self._store.note(self._store.events, json.dumps(to_json(event), separators=(",", ":")))
        self._publish(event)
        return event

    def since(self, sequence: int, job: str | None = None) -> Iterator[EventView]:
        """Past events since `sequence`, of one job or of all."""
        for event in self._events:
            if event.sequence >= sequence and job in (None, event.job):
                yield event

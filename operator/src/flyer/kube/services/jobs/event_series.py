"""Objects of events.k8s.io/v1 about jobs, and series of repeated events. Pure.

An event that repeats within six minutes is one object with a count: the first repetition is
written, and later ones once the count has doubled or a minute has passed, so that an event that
repeats a hundred times a second costs one write a minute. An unwritten count is `overdue` a minute
after the previous write, so that the last count of a series is stored too.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from flyer.api.names import API_VERSION, KIND_JOB

if TYPE_CHECKING:
    from flyer.job_events import JobEvent

__all__ = ["CONTROLLER", "EventSeries", "EventWrite"]

CONTROLLER: Final = "fireflyer.dev/flyer-operator"
SERIES_SECONDS: Final = 360.0
"""A series ends after this time without a repetition, as in Kubernetes' recorder."""
WRITE_SECONDS: Final = 60.0
SERIES_MAX: Final = 1024
"""Series per term; the least recently repeated one is forgotten."""
NOTE_BYTES_MAX: Final = 1024
"""The API server limits bytes, although its message mentions characters."""
ACTION: Final = "Schedule"
_INSTANCE_CHARS_MAX: Final = 128

_Key = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True)
class EventWrite:
    """A new event, or (`repeats`) the patch of an existing one."""

    namespace: str
    name: str
    body: dict[str, Any]
    repeats: bool


@dataclass(slots=True)
class _Recorded:
    namespace: str
    name: str
    count: int
    seen_at: float
    written_at: float
    written: int


class EventSeries:
    """The write for each event. `instance` is this replica's name; times are Unix times."""

    def __init__(self, instance: str) -> None:
        self._instance = instance[:_INSTANCE_CHARS_MAX]
        self._recorded: OrderedDict[_Key, _Recorded] = OrderedDict()
        self._numbers = itertools.count()

    def record(self, job: str, uid: str, event: JobEvent, now: float) -> EventWrite | None:
        """The write for this event; None: a later write of its series includes it."""
        note = _note(event.message)
        key = (uid, event.reason, note, event.warning)
        entry = self._recorded.get(key)
        if entry is not None and now - entry.seen_at <= SERIES_SECONDS:
            self._recorded.move_to_end(key)
            return self._again(entry, now)
        namespace, _, name = job.partition("/")
        suffix = f"{int(now * 1e6):x}{next(self._numbers) & 0xFFF:03x}"
        new = _Recorded(namespace, f"{name}.{suffix}", 1, now, now, 1)
        self._recorded[key] = new
        self._recorded.move_to_end(key)
        if len(self._recorded) > SERIES_MAX:
            self._recorded.popitem(last=False)
        return EventWrite(namespace, new.name, self._event(new, name, uid, event, note, now), False)

    def discard(self, write: EventWrite) -> None:
        """The event is not stored: a repetition creates a new one."""
        for key, entry in self._recorded.items():
            if (entry.namespace, entry.name) == (write.namespace, write.name):
                del self._recorded[key]
                return

    def _again(self, entry: _Recorded, now: float) -> EventWrite | None:
        entry.count += 1
        entry.seen_at = now
        if entry.count < 2 * entry.written and now - entry.written_at < WRITE_SECONDS:
            return None
        return self._counted(entry, now)

    def overdue(self, now: float) -> list[EventWrite]:
        """Writes of counts that no later repetition has written."""
        return [
            self._counted(entry, now)
            for entry in self._recorded.values()
            if entry.count > entry.written and now - entry.written_at >= WRITE_SECONDS
        ]

    @staticmethod
    def _counted(entry: _Recorded, now: float) -> EventWrite:
        entry.written, entry.written_at = entry.count, now
        series = {"count": entry.count, "lastObservedTime": _micro_time(entry.seen_at)}
        return EventWrite(entry.namespace, entry.name, {"series": series}, True)

    def _event(
        self, entry: _Recorded, name: str, uid: str, event: JobEvent, note: str, now: float
    ) -> dict[str, Any]:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": entry.name, "namespace": entry.namespace},
            "regarding": {
                "apiVersion": API_VERSION, "kind": KIND_JOB, "namespace": entry.namespace,
                "name": name, "uid": uid,
            },
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "note": note,
            "action": ACTION,
            "eventTime": _micro_time(now),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
        }  # fmt: skip


def _note(message: str) -> str:
    return message.encode(errors="replace")[:NOTE_BYTES_MAX].decode(errors="ignore")


def _micro_time(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Objects of events.k8s.io/v1 about jobs, and series of those that repeat. Pure.

An event that is told again within six minutes is one object with a count: the first repetition is
written, and later ones when the count has doubled or a minute has passed, so that what repeats a
hundred times a second costs no more than a write a minute. What has not repeated since is `overdue`
a minute after the write before: the last count of a series is stored, too.
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

__all__ = ["CONTROLLER", "EventObjects", "EventWrite"]

CONTROLLER: Final = "fireflyer.dev/flyer-operator"
SERIES_SECONDS: Final = 360.0
"""Without a repetition for this time a series ends, as in Kubernetes' own recorder."""
WRITE_SECONDS: Final = 60.0
SERIES_MAX: Final = 1024
"""Of one term; the one that repeated the longest time ago is forgotten."""
NOTE_BYTES_MAX: Final = 1024
"""The API server counts bytes, though its message says characters."""
ACTION: Final = "Schedule"
_INSTANCE_CHARS_MAX: Final = 128

_Key = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True)
class EventWrite:
    """A new event, or (`repeats`) the patch of one that was announced before."""

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


class EventObjects:
    """What to write for each announcement. `instance` is this replica's name; times are epochs."""

    def __init__(self, instance: str) -> None:
        self._instance = instance[:_INSTANCE_CHARS_MAX]
        self._recorded: OrderedDict[_Key, _Recorded] = OrderedDict()
        self._numbers = itertools.count()

    def record(self, job: str, uid: str, what: JobEvent, now: float) -> EventWrite | None:
        """The write for this announcement; None: a later one of its series has it."""
        note = _note(what.message)
        key = (uid, what.reason, note, what.warning)
        known = self._recorded.get(key)
        if known is not None and now - known.seen_at <= SERIES_SECONDS:
            self._recorded.move_to_end(key)
            return self._again(known, now)
        namespace, _, name = job.partition("/")
        suffix = f"{int(now * 1e6):x}{next(self._numbers) & 0xFFF:03x}"
        new = _Recorded(namespace, f"{name}.{suffix}", 1, now, now, 1)
        self._recorded[key] = new
        self._recorded.move_to_end(key)
        if len(self._recorded) > SERIES_MAX:
            self._recorded.popitem(last=False)
        return EventWrite(namespace, new.name, self._event(new, name, uid, what, note, now), False)

    def lost(self, write: EventWrite) -> None:
        """It is not stored (any more): what is announced again is a new event."""
        for key, known in self._recorded.items():
            if (known.namespace, known.name) == (write.namespace, write.name):
                del self._recorded[key]
                return

    def _again(self, known: _Recorded, now: float) -> EventWrite | None:
        known.count += 1
        known.seen_at = now
        if known.count < 2 * known.written and now - known.written_at < WRITE_SECONDS:
            return None
        return self._counted(known, now)

    def overdue(self, now: float) -> list[EventWrite]:
        """The counts that no later announcement has written."""
        return [
            self._counted(known, now)
            for known in self._recorded.values()
            if known.count > known.written and now - known.written_at >= WRITE_SECONDS
        ]

    @staticmethod
    def _counted(known: _Recorded, now: float) -> EventWrite:
        known.written, known.written_at = known.count, now
        series = {"count": known.count, "lastObservedTime": _micro_time(known.seen_at)}
        return EventWrite(known.namespace, known.name, {"series": series}, True)

    def _event(
        self, known: _Recorded, name: str, uid: str, what: JobEvent, note: str, now: float
    ) -> dict[str, Any]:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": known.name, "namespace": known.namespace},
            "regarding": {
                "apiVersion": API_VERSION, "kind": KIND_JOB, "namespace": known.namespace,
                "name": name, "uid": uid,
            },
            "type": "Warning" if what.warning else "Normal",
            "reason": what.reason,
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

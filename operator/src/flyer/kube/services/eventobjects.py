"""Objects of events.k8s.io/v1 about jobs, and series of those that repeat. Pure.

An event that is told again within six minutes is one object with a count: the first repetition is
written, and later ones when the count has doubled or a minute has passed, so that what repeats a
hundred times a second costs no more than a write a minute.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from flyer.api.names import API_VERSION, KIND_JOB

if TYPE_CHECKING:
    from flyer.kube.services.announcements import Announcement

__all__ = ["CONTROLLER", "EventObjects", "EventWrite"]

CONTROLLER: Final = "fireflyer.dev/flyer-operator"
SERIES_SECONDS: Final = 360.0
"""Without a repetition for this time a series ends, as in Kubernetes' own recorder."""
WRITE_SECONDS: Final = 60.0
SERIES_MAX: Final = 1024
"""Of one term; the one that was told the longest time ago is forgotten."""
NOTE_CHARS_MAX: Final = 1024
ACTION: Final = "Schedule"
_INSTANCE_CHARS_MAX: Final = 128

_Key = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True)
class EventWrite:
    """A new event, or (`repeats`) the patch of one that was told before."""

    namespace: str
    name: str
    body: dict[str, Any]
    repeats: bool


@dataclass(slots=True)
class _Told:
    namespace: str
    name: str
    count: int
    told_at: float
    written_at: float
    written: int


class EventObjects:
    """What to write for what is told. `instance` is this replica's name; times are epochs."""

    def __init__(self, instance: str) -> None:
        self._instance = instance[:_INSTANCE_CHARS_MAX]
        self._told: OrderedDict[_Key, _Told] = OrderedDict()
        self._numbers = itertools.count()

    def tell(self, job: str, uid: str, what: Announcement, now: float) -> EventWrite | None:
        """The write for this announcement; None: a later one of its series has it."""
        key = (uid, what.reason, what.message, what.warning)
        told = self._told.get(key)
        if told is not None and now - told.told_at <= SERIES_SECONDS:
            self._told.move_to_end(key)
            return self._again(told, now)
        namespace, _, name = job.partition("/")
        suffix = f"{int(now * 1e6):x}{next(self._numbers) & 0xFFF:03x}"
        new = _Told(namespace, f"{name}.{suffix}", 1, now, now, 1)
        self._told[key] = new
        self._told.move_to_end(key)
        if len(self._told) > SERIES_MAX:
            self._told.popitem(last=False)
        return EventWrite(namespace, new.name, self._event(new, name, uid, what, now), False)

    def lost(self, write: EventWrite) -> None:
        """It is not stored (any more): what is told again is a new event."""
        for key, told in self._told.items():
            if (told.namespace, told.name) == (write.namespace, write.name):
                del self._told[key]
                return

    def _again(self, told: _Told, now: float) -> EventWrite | None:
        told.count += 1
        told.told_at = now
        if told.count < 2 * told.written and now - told.written_at < WRITE_SECONDS:
            return None
        told.written, told.written_at = told.count, now
        series = {"count": told.count, "lastObservedTime": _micro_time(now)}
        return EventWrite(told.namespace, told.name, {"series": series}, True)

    def _event(
        self, told: _Told, name: str, uid: str, what: Announcement, now: float
    ) -> dict[str, Any]:
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": told.name, "namespace": told.namespace},
            "regarding": {
                "apiVersion": API_VERSION, "kind": KIND_JOB, "namespace": told.namespace,
                "name": name, "uid": uid,
            },
            "type": "Warning" if what.warning else "Normal",
            "reason": what.reason,
            "note": what.message[:NOTE_CHARS_MAX],
            "action": ACTION,
            "eventTime": _micro_time(now),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
        }  # fmt: skip


def _micro_time(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Attempt history: folds a job's events into its attempts and its first failure. Pure.

The FlyerJob's status has only the present; the event log outlives the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from flyer.job_events import ENDS_ATTEMPT, RANK_FAILED, STARTING, SUBMITTED
from flyer.views import AttemptView, EventView, FailureView, PlacedNode, from_json

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["History", "JobHistory"]

ATTEMPTS_KEPT_MAX: Final = 200


@dataclass(slots=True)
class JobHistory:
    """The attempts of one job."""

    attempts: list[AttemptView] = field(default_factory=list)
    failure: FailureView | None = None


class History:
    """The histories of all jobs, updated by `add`."""

    def __init__(self, events: Iterable[EventView] = ()) -> None:
        self._jobs: dict[str, JobHistory] = {}
        for event in events:
            self.add(event)

    def of(self, job: str) -> JobHistory:
        """The history of one job; empty for an unknown job."""
        return self._jobs.get(job) or JobHistory()

    def add(self, event: EventView) -> None:
        """Apply one event."""
        if not event.job:
            return
        if event.reason == SUBMITTED:  # a job of the same name submitted again has a new history
            self._jobs[event.job] = JobHistory()
        history = self._jobs.setdefault(event.job, JobHistory())
        if event.reason == STARTING:
            history.attempts.append(_attempt(event))
            del history.attempts[:-ATTEMPTS_KEPT_MAX]
        elif event.reason == RANK_FAILED:
            history.failure = from_json(FailureView, event.fields)
        elif event.fields.get(ENDS_ATTEMPT):
            _end(history, event)


def _attempt(event: EventView) -> AttemptView:
    fields = event.fields
    return AttemptView(
        attempt=event.attempt or 0,
        started_at=event.time,
        ended_at=None,
        nodes=[from_json(PlacedNode, node) for node in fields.get("nodes", [])],
        restored_step=fields.get("restoredStep"),
        same_zone_layout=fields.get("sameZoneLayout"),
        outcome="",
    )


def _end(history: JobHistory, event: EventView) -> None:
    if not history.attempts:
        return
    last = history.attempts[-1]
    if last.attempt != event.attempt or last.ended_at is not None:
        return
    history.attempts[-1] = replace(
        last,
        ended_at=event.time,
        outcome=str(event.fields.get("why") or event.reason),
        lost_steps=event.fields.get("lostSteps"),
    )

"""Commits of a cycle: the statuses that changed, those that release nodes first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyer.engine.actions import Commit
from flyer.engine.state.conditions import with_conditions
from flyer.engine.state.jobs import RESERVING

if TYPE_CHECKING:
    from flyer.api import FlyerJobStatus
    from flyer.engine.state.cycle_state import CycleState


def collect_commits(
    cycle: CycleState, committed: dict[str, FlyerJobStatus], *, shrinking_only: bool
) -> list[Commit]:
    """Commit every changed status: those that keep no new node first."""
    first: list[Commit] = []
    then: list[Commit] = []
    changed = [
        key
        for key, job in cycle.active_jobs().items()
        if job.status is not _before(cycle, committed, key)
        or job.generation != job.status.observed_generation
    ]
    for key in sorted(changed):
        job, before = cycle.jobs[key], _before(cycle, committed, key)
        cycle.current_job = key
        unobserved = job.generation != job.status.observed_generation and not job.removed
        if (job.status is before or job.status == before) and not unobserved:
            continue
        grows = bool(_kept(job.status) - (_kept(before) if before else frozenset()))
        shrinks = before is not None and bool(_kept(before) - _kept(job.status))
        if shrinking_only and not shrinks:
            continue
        status = with_conditions(job, cycle.now, cycle.zones.limits)
        if before is not None and status == before:
            cycle.put_bookkeeping(replace(job, status=before))
            continue
        status = status.replace(epoch=cycle.epoch)
        cycle.put_bookkeeping(replace(job, status=status))
        committed[key] = status
        (then if grows else first).append(Commit(key, status))
    cycle.current_job = ""
    return first + then


def _before(
    cycle: CycleState, committed: dict[str, FlyerJobStatus], key: str
) -> FlyerJobStatus | None:
    """The status as it was committed last. None for an object that is back.

    While it was gone, nothing that was committed was stored.
    """
    earlier_job = cycle.previous_jobs.get(key)
    if earlier_job is None or (earlier_job.removed and not cycle.jobs[key].removed):
        return committed.get(key)
    return committed.get(key, earlier_job.status)


def _kept(status: FlyerJobStatus) -> frozenset[str]:
    if status.phase not in RESERVING or status.assignment is None:
        return frozenset()
    return frozenset(status.assignment.names)


__all__ = ["collect_commits"]

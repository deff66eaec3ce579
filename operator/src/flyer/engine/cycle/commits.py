"""Commits of a cycle: the statuses that changed, those that release nodes first.

The conditions, reason, message and zones of a status are derived from its other fields. Types and
reasons have the meaning that they have in Kueue's Workload and Trainer's TrainJob. The transition
time of a condition changes only with its status. Conditions of events that have not happened yet
(eviction, progress, checkpoint, end) are absent, as in Kubernetes' Job, because the cost of a
status write grows with its size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from flyer.api import Condition, Phase
from flyer.engine.actions import Commit
from flyer.engine.state.jobs import ACTIVE, HOLDING, RESERVING, JobState
from flyer.engine.state.preemption_limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import FlyerJobStatus
    from flyer.engine.state.cycle_state import CycleState

Fact = tuple[str, bool, str, str]  # type, whether, reason, message

# Omitted until they are true for the first time.
_LATER = frozenset({"Progressing", "CheckpointDurable", "Complete", "Failed"})


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
        (then if grows else first).append(Commit(key, status, uid=job.uid))
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


def with_conditions(job: JobState, now: float, limits: Limits = DEFAULT_LIMITS) -> FlyerJobStatus:
    """The status with current conditions, reason, message and zones."""
    status = job.status
    reason, message = _summary(status)
    zones = "+".join(status.assignment.zones) if status.assignment else ""
    status = status.replace(
        reason=reason, message=message, zones=zones, observed_generation=job.generation
    )
    before_by_type = {condition.type: condition for condition in status.conditions}
    conditions = []
    priority = status.priority or job.spec.priority
    for kind, holds, why, text in _facts(status, limits.clamped(job.spec, priority)):
        value: Literal["True", "False"] = "True" if holds else "False"
        before = before_by_type.get(kind)
        if before is None and not holds and kind in _LATER:
            continue
        same = before is not None and before.status == value
        conditions.append(
            Condition(
                type=kind,
                status=value,
                reason=why,
                message=text,
                last_transition_time=before.last_transition_time if before and same else now,
                observed_generation=job.generation,
            )
        )
    return status.replace(conditions=tuple(conditions))


def _summary(status: FlyerJobStatus) -> tuple[str, str]:
    if status.phase.ended:
        return status.reason, status.message
    if status.phase is Phase.SUSPENDING and status.suspension is not None:
        return status.suspension.reason, status.suspension.message
    if status.phase is Phase.SUSPENDED:
        eviction = status.eviction
        return "Suspended", eviction.message if eviction and eviction.reason == "Suspended" else ""
    if status.phase is Phase.STARTING:
        return "WaitingForPodsReady", "the pods are starting"
    if status.pending is not None:
        return status.pending.reason, status.pending.message
    return "", ""


def _facts(status: FlyerJobStatus, clamped: str) -> Iterator[Fact]:
    phase, message = status.phase, status.message
    suspended = phase is Phase.SUSPENDED
    yield (
        "Suspended",
        suspended,
        "Suspended" if suspended else "Resumed",
        message if suspended else "",
    )
    yield _quota(status)
    active = phase in ACTIVE or phase is Phase.SUSPENDING
    yield "Admitted", active, "Admitted" if active else "NoReservation", clamped if active else ""
    running = phase is Phase.RUNNING
    yield "PodsReady", running, "PodsReady" if running else "WaitForStart", ""
    yield from _eviction(status)
    yield _progressing(status)
    saved = status.checkpoint
    yield (
        "CheckpointDurable",
        saved is not None,
        "CheckpointDurable" if saved else "NoCheckpoint",
        f"step {saved.step} at {saved.path}" if saved else "",
    )
    complete, failed = phase is Phase.SUCCEEDED, phase is Phase.FAILED
    yield (
        "Complete",
        complete,
        status.reason if complete else "NotComplete",
        message if complete else "",
    )
    yield "Failed", failed, status.reason if failed else "NotFailed", message if failed else ""


def _quota(status: FlyerJobStatus) -> Fact:
    holds = status.phase in HOLDING
    if holds:
        return "QuotaReserved", True, "QuotaReserved", ""
    if status.pending is not None:
        return "QuotaReserved", False, status.pending.reason, status.pending.message
    return "QuotaReserved", False, status.reason or "Pending", status.message


def _eviction(status: FlyerJobStatus) -> Iterator[Fact]:
    eviction = status.eviction
    if eviction is None:
        return
    waits = status.phase not in ACTIVE and eviction.attempt == status.history.attempt
    yield "Evicted", waits, eviction.reason, eviction.message
    requeued = status.phase is Phase.QUEUED
    yield "Requeued", requeued, eviction.reason, eviction.message if requeued else ""


def _progressing(status: FlyerJobStatus) -> Fact:
    if status.phase is Phase.RUNNING and status.progress is not None:
        return "Progressing", True, "Progress", ""
    if status.phase in ACTIVE:
        return "Progressing", False, "NoProgressYet", ""
    return "Progressing", False, status.reason or "NotRunning", ""


__all__ = ["collect_commits", "with_conditions"]

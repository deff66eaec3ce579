"""Conditions, reason, message and zones of a status, derived from its other fields.

Types and reasons have the meaning that they have in Kueue's Workload and Trainer's TrainJob. The
transition time of a condition changes only with its status. Conditions of events that have not
happened yet (eviction, progress, checkpoint, end) are absent, as in Kubernetes' Job, because the
cost of a status write grows with its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flyer.api import Condition, Phase
from flyer.engine.state.jobs import ACTIVE, HOLDING, JobState
from flyer.engine.state.preemption_limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import FlyerJobStatus

Fact = tuple[str, bool, str, str]  # type, whether, reason, message

# Omitted until they are true for the first time.
_LATER = frozenset({"Progressing", "CheckpointDurable", "Complete", "Failed"})


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
    if status.phase in (Phase.SUCCEEDED, Phase.FAILED):
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


__all__ = ["with_conditions"]

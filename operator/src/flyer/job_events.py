"""Job events: the vocabulary of reasons, and the events between two statuses of a job. Pure.

`job_events` returns every event of a commit: `flyer events` on one machine, and on Kubernetes for
watching clients. `recorded_event` returns the most important one: the operator records it as a
Kubernetes Event. Both use the same reasons. Events follow commits: a decision that was not written
durably has no event.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flyer.api import FlyerJobStatus, Phase, SuspendCode
from flyer.api.waiting import PENDING_EVALUATION, PODS_REFUSED, WAITING_REASONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import Assignment, Exit

__all__ = ["ENDS_ATTEMPT", "RECORDED_REASONS", "JobEvent", "job_events", "recorded_event"]

# Progress towards running.
SUBMITTED: Final = "Submitted"
QUEUED: Final = "Queued"
ASSIGNED: Final = "Assigned"
STARTING: Final = "Starting"
STARTED: Final = "Started"
CHECKPOINT_DURABLE: Final = "CheckpointDurable"
# Suspension, step by step.
SUSPEND_SIGNALLED: Final = "SuspendSignalled"
SUSPEND_RECEIVED: Final = "SuspendReceived"
GRACE_EXTENDED: Final = "GraceExtended"
GRACE_EXPIRED: Final = "GraceExpired"
RELEASED: Final = "Released"
NODES_FREE: Final = "NodesFree"
RESUMED: Final = "Resumed"
# The end of an attempt.
PREEMPTED: Final = "Preempted"
SUSPENDED: Final = "Suspended"
REQUEUED: Final = "Requeued"
RESTARTED: Final = "Restarted"
# The end of a job.
SUCCEEDED: Final = "Succeeded"
FAILED: Final = "Failed"
REMOVED: Final = "Removed"
# Failures, with their evidence.
POD_EXITED: Final = "PodExited"
RANK_FAILED: Final = "RankFailed"
NODE_LOST: Final = "NodeLost"
NODE_READY: Final = "NodeReady"
DRIVER_RESTARTED: Final = "DriverRestarted"
# Jobs that the scheduler cannot run.
NEVER_FITS: Final = "NeverFits"
INVALID: Final = "InvalidJob"
QUARANTINED: Final = "Quarantined"
EVENT_DROPPED: Final = "EventDropped"

RECORDED_REASONS: Final = (
    *WAITING_REASONS,
    STARTED, PREEMPTED, SUSPENDED, REQUEUED, RESTARTED, SUCCEEDED, FAILED, NEVER_FITS, INVALID,
    QUARANTINED, EVENT_DROPPED,
)  # fmt: skip
"""The reasons of Kubernetes Events."""

ENDS_ATTEMPT: Final = "endsAttempt"
"""An event with this field set ends the attempt that it names."""

# By the reason of the eviction; others are failures of the infrastructure: Restarted.
_EVICTIONS: Final = {
    "Preempted": PREEMPTED, "Suspended": SUSPENDED, "Requeued": REQUEUED, "Yielded": REQUEUED,
    "NodeDrained": REQUEUED,
    PODS_REFUSED: PODS_REFUSED,
}  # fmt: skip
_WARNINGS: Final = frozenset({RESTARTED, PODS_REFUSED})
_RESERVED: Final = (Phase.RESERVED, Phase.DRAINING)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of one job, without its time and sequence number."""

    reason: str
    message: str
    warning: bool = False
    attempt: int | None = None
    node: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


def job_events(before: FlyerJobStatus | None, after: FlyerJobStatus) -> Iterator[JobEvent]:
    """Every event between two statuses, in the order in which they happened."""
    before = before or FlyerJobStatus(reason="New")
    attempt = after.history.attempt or None
    yield from _checkpoint(before, after, attempt)
    yield from _suspension(before, after, attempt)
    yield from _exits(before, after, attempt)
    if before.occupied and not after.occupied:
        assignment = before.assignment or after.assignment
        count = len(assignment.nodes) if assignment else len(before.occupied)
        message = f"{_nodes(count)} free again"
        yield JobEvent(NODES_FREE, message, attempt=attempt, fields={"nodes": count})
    yield from _evicted(before, after)
    yield from _phase(before, after)
    yield from _pending(before, after)


def recorded_event(before: FlyerJobStatus | None, after: FlyerJobStatus) -> JobEvent | None:
    """The most important event between two statuses, if one is worth a Kubernetes Event."""
    before = before or FlyerJobStatus()
    events = itertools.chain(
        _running_or_ended(before, after), _evicted(before, after), _pending(before, after)
    )
    return next(events, None)


def _checkpoint(
    before: FlyerJobStatus, after: FlyerJobStatus, attempt: int | None
) -> Iterator[JobEvent]:
    saved = after.checkpoint
    if saved is None or saved == before.checkpoint:
        return
    yield JobEvent(
        CHECKPOINT_DURABLE,
        f"step {saved.step} is durable in {saved.path}",
        attempt=attempt,
        fields={"step": saved.step, "path": saved.path},
    )


def _suspension(
    before: FlyerJobStatus, after: FlyerJobStatus, attempt: int | None
) -> Iterator[JobEvent]:
    now, old = after.suspension, before.suspension
    if now is not None and old is None:
        yield JobEvent(
            SUSPEND_SIGNALLED,
            f"asked to save and release its nodes within {now.deadline - now.since:.0f} s "
            f"({now.message or f'{now.reason} by {now.by}'})",
            attempt=attempt,
            fields={"by": now.by, "reason": now.reason, "deadline": now.deadline},
        )
    elif now is not None and old is not None:
        if now.deadline > old.deadline:
            yield JobEvent(
                GRACE_EXTENDED,
                f"the job reports progress: {now.deadline - old.deadline:.1f} s more to save",
                attempt=attempt,
                fields={"deadline": now.deadline},
            )
        if now.expired and not old.expired:
            yield JobEvent(
                GRACE_EXPIRED,
                f"not released within {now.deadline - now.since:.0f} s: killed, "
                f"{_restarts_from(after)}",
                warning=True,
                attempt=attempt,
            )
    if after.suspend_code >= SuspendCode.RECEIVED > before.suspend_code:
        yield JobEvent(SUSPEND_RECEIVED, "the job received the signal and saves", attempt=attempt)
    if after.suspend_code >= SuspendCode.MAY_SUSPEND > before.suspend_code:
        yield JobEvent(RELEASED, "the job has saved and releases its nodes", attempt=attempt)


def _exits(
    before: FlyerJobStatus, after: FlyerJobStatus, attempt: int | None
) -> Iterator[JobEvent]:
    if before.suspension is not None or after.suspension is not None:
        return
    reported = {(exit_.node, exit_.time) for exit_ in before.exits}
    for exit_ in after.exits:
        if (exit_.node, exit_.time) in reported:
            continue
        if exit_.outcome == "Succeeded" or exit_.reason == "vanished":
            continue
        yield JobEvent(
            POD_EXITED,
            f"pod on {exit_.node} {_how(exit_)}{': ' + exit_.reason if exit_.reason else ''}",
            warning=True,
            attempt=attempt,
            node=exit_.node,
            fields={"exitStatus": exit_.exit_status, "signal": exit_.signal},
        )


def _evicted(before: FlyerJobStatus, after: FlyerJobStatus) -> Iterator[JobEvent]:
    eviction = after.eviction
    if eviction is None or eviction == before.eviction:
        return
    reason = _EVICTIONS.get(eviction.reason, RESTARTED)
    message = eviction.message or (f"by {eviction.by}" if eviction.by else "")
    if reason != eviction.reason:
        message = ": ".join(filter(None, (eviction.reason, message)))
    loss = f"; {eviction.lost_steps} steps lost" if eviction.lost_steps else ""
    yield JobEvent(
        reason,
        f"{message}{loss}",
        warning=reason in _WARNINGS,
        attempt=eviction.attempt,
        fields=_ends(
            why=eviction.reason,
            by=eviction.by,
            lostSteps=eviction.lost_steps,
            suspendCode=int(eviction.suspend_code),
        ),
    )


def _phase(before: FlyerJobStatus, after: FlyerJobStatus) -> Iterator[JobEvent]:
    if before.reason == "New" and after.phase is Phase.QUEUED:
        if not _is_evaluated(after):
            yield JobEvent(QUEUED, after.message or "waits for its nodes")
        return
    if before.phase is after.phase:
        return
    attempt = after.history.attempt or None
    match after.phase:
        case Phase.DRAINING | Phase.RESERVED if after.assignment and before.phase not in _RESERVED:
            yield _assigned(after, after.assignment)
        case Phase.STARTING if after.assignment:
            if before.phase not in _RESERVED:
                yield _assigned(after, after.assignment)
            yield _starting(after, after.assignment)
        case Phase.SUSPENDED if not _left_by_suspension(before, after):
            yield JobEvent(SUSPENDED, after.message or "waits for `flyer resume`", attempt=attempt)
        case Phase.QUEUED if before.phase is Phase.SUSPENDED:
            yield JobEvent(RESUMED, "queued again in its previous position", attempt=attempt)
        case _:
            yield from _running_or_ended(before, after)


def _running_or_ended(before: FlyerJobStatus, after: FlyerJobStatus) -> Iterator[JobEvent]:
    if before.phase is after.phase:
        return
    attempt = after.history.attempt or None
    match after.phase:
        case Phase.RUNNING if after.assignment is not None:
            nodes = _nodes(len(after.assignment.nodes))
            resumed = f", from step {after.checkpoint.step}" if after.checkpoint else ""
            zones = after.zones or "+".join(after.assignment.zones)
            message = f"attempt {attempt} runs on {nodes}, zone {zones}{resumed}"
            yield JobEvent(STARTED, message, attempt=attempt)
        case Phase.SUCCEEDED:
            message = after.message or "all ranks succeeded"
            yield JobEvent(SUCCEEDED, message, attempt=attempt, fields=_ends())
        case Phase.FAILED:
            message = ": ".join(filter(None, (after.reason, after.message)))
            fields = _ends(why=after.reason)
            yield JobEvent(FAILED, message, warning=True, attempt=attempt, fields=fields)


def _pending(before: FlyerJobStatus, after: FlyerJobStatus) -> Iterator[JobEvent]:
    """Reported once each time the job is queued: the reason for waiting changes too often."""
    pending = after.pending
    if pending is None:
        return
    if pending.verdict == "Never":
        if before.pending is None or before.pending.verdict != "Never":
            yield JobEvent(NEVER_FITS, pending.message, warning=True)
    elif _is_evaluated(after) and not _is_evaluated(before):
        yield JobEvent(pending.reason, pending.message)


def _is_evaluated(status: FlyerJobStatus) -> bool:
    return status.pending is not None and status.pending.reason != PENDING_EVALUATION


def _left_by_suspension(before: FlyerJobStatus, after: FlyerJobStatus) -> bool:
    """Whether the eviction of this commit is the suspension, which has a separate event."""
    eviction = after.eviction
    return eviction is not None and eviction != before.eviction and eviction.reason == SUSPENDED


def _assigned(status: FlyerJobStatus, assignment: Assignment) -> JobEvent:
    places = ", ".join(f"{node.name} ({node.zone})" for node in assignment.nodes)
    waits = "; waits until they are empty" if status.phase is Phase.DRAINING else ""
    return JobEvent(
        ASSIGNED,
        f"gets {places}{waits}",
        fields={"nodes": list(assignment.names), "zones": list(assignment.zones)},
    )


def _starting(status: FlyerJobStatus, assignment: Assignment) -> JobEvent:
    attempt = status.history.attempt
    checkpoint = status.checkpoint
    origin = f"from step {checkpoint.step}" if checkpoint else "from the beginning"
    split = {
        True: ", same distribution over zones",
        False: ", another distribution over zones",
        None: "",
    }
    return JobEvent(
        STARTING,
        f"attempt {attempt} starts {origin}{split[assignment.same_zone_layout]}",
        attempt=attempt,
        fields={
            "nodes": [
                {"name": node.name, "zone": node.zone, "firstRank": node.first_rank}
                for node in assignment.nodes
            ],
            "restoredStep": checkpoint.step if checkpoint else None,
            "sameZoneLayout": assignment.same_zone_layout,
        },
    )


def _ends(**fields: Any) -> dict[str, Any]:
    return {ENDS_ATTEMPT: True, **fields}


def _restarts_from(status: FlyerJobStatus) -> str:
    checkpoint = status.checkpoint
    if checkpoint is None:
        return "it has no durable checkpoint and restarts from the beginning"
    return f"it restarts from step {checkpoint.step}"


def _how(exit_: Exit) -> str:
    if exit_.outcome == "Failed":
        return f"exited with status {exit_.exit_status}"
    return f"was killed by signal {exit_.signal}" if exit_.signal else "vanished"


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"

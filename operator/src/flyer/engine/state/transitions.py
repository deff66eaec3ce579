"""Transitions of one job from phase to phase, one function each.

A job leaves its nodes by `request_suspension` → `end_suspension` (on request), by
`restarts.restart` (after a failure) or by `end`. In each case `occupied` names the nodes until a
driver reports them empty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyer.api import (
    AssignedNode,
    Assignment,
    Eviction,
    FlyerJobStatus,
    JobHistory,
    OccupiedNode,
    PastAttempt,
    Pending,
    Phase,
    PreviousNode,
    Priority,
    Progress,
    SuspendCode,
    Suspension,
    quantize,
)
from flyer.api.limits import (
    BY_CHARS_MAX,
    PAST_ATTEMPT_NODES_MAX,
    PAST_ATTEMPTS_MAX,
    PREEMPTIONS_MAX,
)
from flyer.engine.state.jobs import JobState, ObservedState, SentActions
from flyer.job.limits import readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import FlyerJob
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.nodes import Node

# Reasons for which a suspension ends the job instead of queueing it again.
FINAL_REASONS = frozenset({"Stopped", "DeadlineExceeded"})
# The API server accepts 32768. Longer messages are not readable.
_MESSAGE_CHARS_MAX = 8_192


def new_job(job: FlyerJob, now: float, *, rebuilt: bool = False) -> JobState:
    """A job as submitted, or as its status describes it.

    `rebuilt`: an earlier engine may have known the job. The first status of a waiting job is stored
    with a delay, so a job without one has waited since its creation. Otherwise each rebuild would
    restart the delay before it may preempt.
    """
    created_at = job.metadata.creation_timestamp or now
    status = job.status or FlyerJobStatus(
        history=JobHistory(
            id=job.metadata.uid or job.key,
            submitted_at=created_at,
            queued_at=min(created_at, now) if rebuilt else now,
        ),
        pending=Pending(reason="PendingEvaluation", message="not looked at yet"),
    )
    progress = status.progress
    return JobState(
        key=job.key,
        user=job.user,
        generation=job.metadata.generation,
        spec=job.spec,
        status=status,
        suspend=job.spec.suspend,
        uid=job.metadata.uid or "",
        queue=job.queue,
        suspend_by=job.changed_by,
        suspend_reason=job.change_reason,
        requeue=job.requeue_attempt,
        observed=ObservedState(
            activity_at=now,
            step=progress.step if progress else None,
            # Not `now`: frequent rebuilds would defer the next commit forever.
            progress_committed_at=min(progress.time, now) if progress else 0.0,
        ),
        sent_actions=SentActions(),
    )


def reserve(cycle: CycleState, key: str, nodes: Sequence[Node], *, backfill: bool = False) -> None:
    """Reserve nodes for the job, in rank order, for a new attempt.

    `backfill`: a job ahead of it waits for some of them and may preempt it.
    """
    job = cycle.jobs[key]
    priority = cycle.priority(job)
    history = job.status.history
    zones = [node.zone for node in nodes]
    crossings = [index for index in range(1, len(zones)) if zones[index - 1] != zones[index]]
    assert len(crossings) <= 1, f"{key}: ranks are not contiguous by zone: {zones}"
    assignment = Assignment(
        epoch=cycle.epoch,
        nodes=tuple(
            AssignedNode(name=node.name, zone=node.zone, first_rank=index * job.spec.ranks_per_node)
            for index, node in enumerate(nodes)
        ),
        cross_zone_pair=tuple(nodes[index].name for at in crossings for index in (at - 1, at)),
        node_class=nodes[0].node_class,
        backfill=backfill,
        reserved_at=cycle.now,
    )
    if history.previous:
        before = [node.zone for node in history.previous]
        zone_layout = tuple(before.count(zone) for zone in dict.fromkeys(before))
        assignment = assignment.replace(same_zone_layout=zone_layout == assignment.zone_layout)
    cycle.update(
        key,
        phase=Phase.RESERVED,
        suspend_code=SuspendCode.NONE,
        priority=priority,
        assignment=assignment,
        exits=(),
        pending=None,
        history=history.replace(attempt=history.attempt + 1, not_before=None),
    )


def drop_reservation(cycle: CycleState, key: str) -> None:
    """Release reserved nodes on which no pod was started."""
    job = cycle.jobs[key]
    cycle.update(
        key,
        phase=Phase.SUSPENDED if job.suspend else Phase.QUEUED,
        assignment=None,
        priority=_still_held(job),
        pending=None,
    )


def _still_held(job: JobState) -> Priority | None:
    """The priority that is kept while processes of the job may still exist on some node."""
    return job.status.priority if job.status.occupied else None


def start(cycle: CycleState, key: str) -> None:
    """Start the job on its nodes, which are empty and healthy. From here on it occupies them."""
    job = cycle.jobs[key]
    assignment, attempt = job.status.assignment, job.status.history.attempt
    assert assignment is not None, f"{key}: starts without nodes"
    assert not {node.name for node in job.status.occupied} & set(assignment.names), key
    # Steps after the checkpoint are repeated: they are not counted as lost a second time.
    saved = job.status.checkpoint
    progress = Progress(step=saved.step, time=cycle.now) if saved else None
    cycle.update(
        key,
        phase=Phase.STARTING,
        progress=progress,
        assignment=assignment.replace(
            started_at=cycle.now, restored_step=saved.step if saved else None
        ),
        occupied=job.status.occupied
        + tuple(
            OccupiedNode(name=node.name, zone=node.zone, attempt=attempt)
            for node in assignment.nodes
        ),
        pending=None,
    )
    observed = replace(
        job.observed,
        activity_at=cycle.now,
        step=progress.step if progress else None,
        stream_lost_at=None,
        absent=(),
    )
    cycle.put(replace(cycle.jobs[key], observed=observed))


def record_nodes(cycle: CycleState, key: str) -> None:
    """Record the nodes whose zone layout later attempts should have."""
    job = cycle.jobs[key]
    assert job.status.assignment is not None, f"{key}: has no nodes to remember"
    nodes = tuple(PreviousNode(name=n.name, zone=n.zone) for n in job.status.assignment.nodes)
    if nodes != job.status.history.previous:
        cycle.update(key, history=job.status.history.replace(previous=nodes))


def request_suspension(
    cycle: CycleState, key: str, *, reason: str, by: str, message: str, kill: bool = False
) -> None:
    """Request that the job saves and releases its nodes. A starting job is stopped immediately."""
    job = flush_progress(cycle, key)
    terms = cycle.terms(job)
    kill = kill or job.status.phase is Phase.STARTING
    grace = 0.0 if kill else terms.checkpoint_grace_period
    limit = 0.0 if kill else terms.max_checkpoint_grace_period
    cycle.update(
        key,
        phase=Phase.SUSPENDING,
        suspend_code=SuspendCode.SENT,
        suspension=Suspension(
            reason=reason,
            by=truncated(by, BY_CHARS_MAX),
            message=truncated(message),
            since=cycle.now,
            deadline=quantize(cycle.now + grace),
            limit=quantize(cycle.now + limit),
            expired=kill,
        ),
    )


def stop(cycle: CycleState, key: str, *, by: str, reason: str, kill: bool) -> None:
    """Stop the job permanently after a checkpoint or immediately. Repeated calls change nothing."""
    job = cycle.jobs[key]
    if job.ended:
        return
    message = truncated(f"stopped by {by}" + (f": {reason}" if reason else ""))
    suspension = job.status.suspension
    if job.status.phase is Phase.SUSPENDING and suspension is not None:
        if suspension.reason == "Stopped" and (suspension.expired or not kill):
            return
        request = suspension.replace(
            reason="Stopped", by=truncated(by, BY_CHARS_MAX), message=message
        )
        if kill:
            request = request.replace(deadline=cycle.now, expired=True)
        cycle.update(key, suspension=request)
    elif job.status.phase in (Phase.STARTING, Phase.RUNNING):
        request_suspension(cycle, key, reason="Stopped", by=by, message=message, kill=kill)
    else:
        end(cycle, key, Phase.FAILED, "Stopped", message)


def extend_grace(cycle: CycleState, key: str) -> None:
    """Extend the deadline of a job that received the signal and reports progress, up to limit."""
    job = cycle.jobs[key]
    suspension = job.status.suspension
    acknowledged = job.status.suspend_code is SuspendCode.RECEIVED
    if suspension is None or suspension.expired or not acknowledged:
        return
    grace = cycle.terms(job).checkpoint_grace_period
    deadline = quantize(min(suspension.limit, cycle.now + grace))
    # In steps of a quarter of the grace period, because each step is a commit and a signal.
    if deadline - suspension.deadline >= grace / 4 or (
        deadline == suspension.limit > suspension.deadline
    ):
        cycle.update(key, suspension=suspension.replace(deadline=deadline))


def end_suspension(cycle: CycleState, key: str) -> None:
    """Queue the job again after it has released its nodes, or end it."""
    job = flush_progress(cycle, key)
    suspension = job.status.suspension
    assert suspension is not None, f"{key}: suspending without a suspension"
    if suspension.reason in FINAL_REASONS:
        end(cycle, key, Phase.FAILED, suspension.reason, suspension.message)
        return
    requeue(cycle, key, suspension.reason, suspension.by, suspension.message)


def end(cycle: CycleState, key: str, phase: Phase, reason: str, message: str) -> None:
    """End the job. Its assignment is kept as the record of where it ran."""
    flush_progress(cycle, key)
    cycle.update(
        key, phase=phase, reason=reason, message=truncated(message), suspension=None, pending=None
    )


def truncated(words: str, chars_max: int = _MESSAGE_CHARS_MAX) -> str:
    """The text, cut to what fits into a status."""
    words = readable(words)
    return words if len(words) <= chars_max else f"{words[: chars_max - 1]}…"


def flush_progress(cycle: CycleState, key: str) -> JobState:
    """Write the latest observed step into the status."""
    job = cycle.jobs[key]
    step, published = job.observed.step, job.status.progress
    if step is None or (published is not None and published.step == step):
        return job
    progress = Progress(
        step=step,
        time=job.observed.activity_at,
        exposed_percent=job.observed.exposed_percent,
    )
    job = cycle.update(key, progress=progress)
    return cycle.put(replace(job, observed=replace(job.observed, progress_committed_at=cycle.now)))


def requeue(cycle: CycleState, key: str, reason: str, by: str, message: str) -> None:
    """End the attempt and queue the job again, or suspend it if its owner asked for that."""
    job = cycle.jobs[key]
    status = job.status
    lost_steps = None
    if status.suspend_code is SuspendCode.MAY_SUSPEND:
        # The job reported a checkpoint before it released its nodes.
        lost_steps = 0
    elif status.progress is not None:
        saved = status.checkpoint.step if status.checkpoint else 0
        lost_steps = max(0, status.progress.step - saved)
    cycle.update(
        key,
        phase=Phase.SUSPENDED if job.suspend else Phase.QUEUED,
        assignment=None,
        priority=_still_held(job),
        suspension=None,
        pending=None,
        past_attempts=_with_attempt(status, cycle.now, reason, lost_steps),
        eviction=Eviction(
            reason=reason,
            by=truncated(by, BY_CHARS_MAX),
            message=truncated(message),
            time=cycle.now,
            attempt=status.history.attempt,
            suspend_code=status.suspend_code,
            lost_steps=lost_steps,
        ),
        history=status.history.replace(queued_at=cycle.now, slice_used=_slice_used(cycle, job)),
    )


def _with_attempt(
    status: FlyerJobStatus, now: float, reason: str, lost_steps: int | None
) -> tuple[PastAttempt, ...]:
    """The past attempts with the one that ends now, if its pods were started."""
    assignment = status.assignment
    if assignment is None or assignment.started_at is None:
        return status.past_attempts
    names = ((node.name, node.zone) for node in assignment.nodes[:PAST_ATTEMPT_NODES_MAX])
    ended = PastAttempt(
        attempt=status.history.attempt,
        started_at=assignment.started_at,
        ended_at=now,
        reason=reason,
        node_count=len(assignment.nodes),
        nodes=tuple(PreviousNode(name=name, zone=zone) for name, zone in names),
        restored_step=assignment.restored_step,
        same_zone_layout=assignment.same_zone_layout,
        lost_steps=lost_steps,
    )
    return (*status.past_attempts, ended)[-PAST_ATTEMPTS_MAX:]


def end_time_slice(cycle: CycleState, key: str) -> None:
    """End the time slice: the job queues behind the waiting jobs of its priority."""
    history = cycle.jobs[key].status.history
    cycle.update(key, history=history.replace(turn_at=cycle.now, slice_used=0.0))


def count_preemption(cycle: CycleState, key: str) -> None:
    """Count a preemption before the end of the time slice against the job's budget.

    The list of past attempts cannot be used: it includes ended time slices, and a few restarts
    fill it.
    """
    history = cycle.jobs[key].status.history
    since = cycle.now - cycle.settings.preemptions_seconds
    recent = [at for at in history.preempted_at if at > since]
    latest = tuple([*recent, cycle.now][-PREEMPTIONS_MAX:])
    cycle.update(key, history=history.replace(preempted_at=latest))


def _slice_used(cycle: CycleState, job: JobState) -> float:
    """Seconds of the time slice that the job has used, including the attempt that ends now."""
    history, assignment = job.status.history, job.status.assignment
    running_at = assignment.running_at if assignment is not None else None
    if running_at is None:
        return history.slice_used
    if history.turn_at is not None and history.turn_at >= running_at:
        return 0.0  # it was preempted because the slice was over
    return quantize(history.slice_used + max(0.0, cycle.now - running_at))


__all__ = [
    "FINAL_REASONS",
    "count_preemption",
    "drop_reservation",
    "end",
    "end_suspension",
    "end_time_slice",
    "extend_grace",
    "flush_progress",
    "new_job",
    "record_nodes",
    "request_suspension",
    "requeue",
    "reserve",
    "start",
    "stop",
]

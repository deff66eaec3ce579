"""Handlers of events about attempts: pods, gangs, progress, checkpoints, streams, suspend codes.

An event of another attempt than the current one changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.api import Checkpoint, Exit, Phase, SuspendCode
from flyer.engine import events
from flyer.engine.cycle import circuit_breaker
from flyer.engine.state import restarts, transitions
from flyer.engine.state.jobs import ACTIVE
from flyer.job.limits import REASON_CHARS_MAX, TRACEBACK_CHARS_MAX, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState

USER_STATE_MAX = 2**32 - 1
# The first exits show the cause. The reasons of 3,000 exits would exceed an object's 1.5 MB.
EXITS_WITH_REASON_MAX = 64
_OUTCOMES = {
    events.Succeeded: "Succeeded",
    events.Failed: "Failed",
    events.Killed: "Killed",
}


# -- starts ---------------------------------------------------------------------------------------


def handle_gang_started(event: events.GangStarted, cycle: CycleState) -> None:
    """The job runs: clear what failed starts have recorded of it and of its nodes."""
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.status.phase is not Phase.STARTING:
        return
    assert job.status.assignment is not None, event.job
    _record_activity(cycle, event.job, event.attempt)
    cycle.update(
        event.job,
        phase=Phase.RUNNING,
        assignment=job.status.assignment.replace(running_at=cycle.now),
    )
    restarts.reset_refusals(cycle, event.job)
    circuit_breaker.record_incident(cycle, "up", job)
    for name in job.status.assignment.names:
        state = cycle.nodes.get(name)
        if state is not None and state.start_failures:
            cycle.nodes[name] = replace(state, start_failures=())
    if job.status.checkpoint is None:
        transitions.record_nodes(cycle, event.job)


def handle_start_pending(event: events.StartPending, cycle: CycleState) -> None:
    """Record the nodes whose pods are not up yet."""
    job = cycle.jobs.get(event.job)
    if job is not None and _is_starting(job, event.attempt):
        cycle.put(replace(job, observed=replace(job.observed, absent=event.nodes)))


def handle_start_failed(event: events.StartFailed, cycle: CycleState) -> None:
    """Restart the job, and avoid the nodes that made the start fail."""
    job = cycle.jobs.get(event.job)
    if job is None or not _is_starting(job, event.attempt) or job.status.assignment is None:
        return
    failed_nodes = [name for name in job.status.assignment.names if name in event.nodes]
    if event.job_fault:
        failed_nodes = []  # the start fails on any node
    else:
        restarts.suspect_nodes(cycle, event.job, failed_nodes)
        circuit_breaker.record_incident(cycle, "start", job)
    restarts.restart(
        cycle, event.job, reason="StartFailed", message=event.reason, avoid=failed_nodes,
        counted=event.job_fault, slow=True,
    )  # fmt: skip


def handle_start_refused(event: events.StartRefused, cycle: CycleState) -> None:
    """Queue the job again after a pause."""
    job = cycle.jobs.get(event.job)
    if job is not None and _is_starting(job, event.attempt):
        restarts.refuse_start(cycle, event.job, event.reason, transient=event.transient)


# -- pods and nodes -------------------------------------------------------------------------------


def handle_pod_exited(event: events.PodExited, cycle: CycleState) -> None:
    """Record the exit, the first one of each node."""
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.status.assignment is None:
        return
    reported = any(exited.node == event.node for exited in job.status.exits)
    if not reported and event.node in job.status.assignment.names:
        _record_exit(cycle, event.job, event.node, event.outcome)


def handle_node_emptied(event: events.NodeEmptied, cycle: CycleState) -> None:
    """Record that the node is empty. A pod that disappeared without an exit counts as killed."""
    job = cycle.jobs.get(event.job)
    if job is None:
        return
    occupied = tuple(
        node
        for node in job.status.occupied
        if node.name != event.node or node.attempt > event.attempt
    )
    if occupied == job.status.occupied:
        return
    vanished = (
        job.status.phase in ACTIVE
        and event.attempt == job.status.history.attempt
        and job.status.assignment is not None
        and event.node in job.status.assignment.names
        and all(exited.node != event.node for exited in job.status.exits)
    )
    if vanished:
        _record_exit(cycle, event.job, event.node, events.Killed(0, "vanished"))
    stops = {name: stop for name, stop in job.sent_actions.stops.items() if name != event.node}
    cycle.put(replace(cycle.jobs[event.job], sent_actions=replace(job.sent_actions, stops=stops)))
    cycle.update(event.job, occupied=occupied)


def _record_exit(cycle: CycleState, key: str, node: str, outcome: events.Outcome) -> None:
    exits = cycle.jobs[key].status.exits
    # One traceback suffices, and those of a gang would not fit into its object.
    has_traceback = any(exited.traceback for exited in exits)
    traceback = readable(getattr(outcome, "traceback", ""))
    reason = getattr(outcome, "reason", "") if len(exits) < EXITS_WITH_REASON_MAX else ""
    recorded = Exit(
        node=node,
        outcome=_OUTCOMES[type(outcome)],  # type: ignore[arg-type]
        exit_status=getattr(outcome, "exit_status", None),
        signal=getattr(outcome, "signal", None),
        reason=readable(reason)[:REASON_CHARS_MAX],
        rank=getattr(outcome, "rank", None),
        traceback=None if has_traceback else traceback[-TRACEBACK_CHARS_MAX:] or None,
        time=cycle.now,
    )
    cycle.update(key, exits=(*exits, recorded))


# -- reports of running jobs ----------------------------------------------------------------------


def handle_progress_reported(event: events.ProgressReported, cycle: CycleState) -> None:
    """Record the step; it extends the checkpoint grace period."""
    job = _record_activity(cycle, event.job, event.attempt)
    if job is None:
        return
    observed = replace(job.observed, step=event.step, exposed_percent=event.exposed_percent)
    cycle.put(replace(job, observed=observed))
    if cycle.now >= job.observed.progress_committed_at + cycle.settings.progress_commit_seconds:
        transitions.flush_progress(cycle, event.job)
    transitions.extend_grace(cycle, event.job)


def handle_log_observed(event: events.LogObserved, cycle: CycleState) -> None:
    """Restart the progress deadline."""
    _record_activity(cycle, event.job, event.attempt)


def handle_checkpoint_reported(event: events.CheckpointReported, cycle: CycleState) -> None:
    """Record a durable checkpoint and the nodes that wrote it."""
    job = cycle.jobs.get(event.job)
    if job is None or event.attempt != job.status.history.attempt:
        return
    _record_activity(cycle, event.job, event.attempt)
    if event.durable:
        history = job.status.history
        cycle.update(
            event.job,
            checkpoint=Checkpoint(step=event.step, time=cycle.now, path=event.path),
            # The job makes progress where it is: nodes that failed it earlier may be used again.
            history=history.replace(avoid=()) if history.avoid else history,
        )
        if job.status.assignment is not None:
            transitions.record_nodes(cycle, event.job)
    transitions.extend_grace(cycle, event.job)


def handle_user_state_set(event: events.UserStateSet, cycle: CycleState) -> None:
    """Record the user state, if it is a 32-bit number."""
    job = cycle.jobs.get(event.job)
    valid = 0 <= event.value <= USER_STATE_MAX
    if valid and job is not None and event.attempt == job.status.history.attempt:
        cycle.update(event.job, history=job.status.history.replace(user_state=event.value))


def handle_suspend_received(event: events.SuspendReceived, cycle: CycleState) -> None:
    """Raise the suspend code to RECEIVED."""
    _raise_suspend_code(cycle, event.job, event.attempt, SuspendCode.RECEIVED)


def handle_released(event: events.Released, cycle: CycleState) -> None:
    """Raise the suspend code to MAY_SUSPEND; a job that was not asked is suspended now."""
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt):
        return
    if job.status.phase is not Phase.SUSPENDING:
        transitions.request_suspension(
            cycle, event.job, reason="Yielded", by=event.job, message="the job gave its nodes back"
        )
    _raise_suspend_code(cycle, event.job, event.attempt, SuspendCode.MAY_SUSPEND)


def handle_stream_lost(event: events.StreamLost, cycle: CycleState) -> None:
    """Record since when no messages of the job can be received."""
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.observed.stream_lost_at is not None:
        return
    cycle.put(replace(job, observed=replace(job.observed, stream_lost_at=cycle.now)))


def handle_stream_restored(event: events.StreamRestored, cycle: CycleState) -> None:
    """Extend the progress deadline by the time without a stream."""
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.observed.stream_lost_at is None:
        return
    activity_at = job.observed.activity_at + (cycle.now - job.observed.stream_lost_at)
    observed = replace(job.observed, stream_lost_at=None, activity_at=min(cycle.now, activity_at))
    cycle.put(replace(job, observed=observed))


def _is_starting(job: JobState, attempt: int) -> bool:
    return job.status.phase is Phase.STARTING and job.status.history.attempt == attempt


def _is_live(job: JobState, attempt: int) -> bool:
    return job.status.phase.has_pods and job.status.history.attempt == attempt


def _record_activity(cycle: CycleState, key: str, attempt: int) -> JobState | None:
    """Restart the progress deadline if this attempt is alive, and return the job then."""
    job = cycle.jobs.get(key)
    if job is None or not _is_live(job, attempt):
        return None
    return cycle.put(replace(job, observed=replace(job.observed, activity_at=cycle.now)))


def _raise_suspend_code(cycle: CycleState, key: str, attempt: int, code: SuspendCode) -> None:
    job = cycle.jobs.get(key)
    if job is None or job.status.phase is not Phase.SUSPENDING:
        return
    if job.status.history.attempt == attempt and job.status.suspend_code < code:
        cycle.update(key, suspend_code=code)


ATTEMPT_HANDLERS: Mapping[type, Callable[[Any, CycleState], None]] = {
    events.GangStarted: handle_gang_started,
    events.StartPending: handle_start_pending,
    events.StartFailed: handle_start_failed,
    events.StartRefused: handle_start_refused,
    events.PodExited: handle_pod_exited,
    events.NodeEmptied: handle_node_emptied,
    events.ProgressReported: handle_progress_reported,
    events.LogObserved: handle_log_observed,
    events.CheckpointReported: handle_checkpoint_reported,
    events.UserStateSet: handle_user_state_set,
    events.SuspendReceived: handle_suspend_received,
    events.Released: handle_released,
    events.StreamLost: handle_stream_lost,
    events.StreamRestored: handle_stream_restored,
}

__all__ = ["ATTEMPT_HANDLERS", "EXITS_WITH_REASON_MAX", "USER_STATE_MAX"]

"""Events: what each one changes, before anything is decided.

An event records a fact; `reconcile` judges. So the order of events inside one step does not matter,
and a state that was rebuilt judges the same facts again.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from flyer.api import Checkpoint, Exit, Phase, SuspendCode
from flyer.engine import events as happened
from flyer.engine import incidents, quotas, transitions
from flyer.engine.draft import ACTIVE
from flyer.engine.state import NodeState, Sent
from flyer.job.limits import REASON_CHARS_MAX, TRACEBACK_CHARS_MAX, readable

if TYPE_CHECKING:
    from flyer.api import Duration
    from flyer.engine.draft import CycleState
    from flyer.engine.events import Event
    from flyer.engine.state import JobState

_OUTCOMES = {
    happened.Succeeded: "Succeeded",
    happened.Failed: "Failed",
    happened.Killed: "Killed",
}
_LIVE = frozenset({Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING})
LIFE_STATE_MAX = 2**32 - 1
# The first exits tell why. An object may have 1.5 MB, which the words of 3,000 would exceed.
EXITS_WITH_REASON_MAX = 64


@functools.singledispatch
def react(event: Event, cycle: CycleState) -> None:
    """Take one event in."""
    raise AssertionError(f"no reaction to {event!r} at {cycle.now}")


@react.register(happened.Tick)
def _(_event: happened.Tick, _cycle: CycleState) -> None:
    pass


@react.register(happened.NodeObserved)
def _(event: happened.NodeObserved, cycle: CycleState) -> None:
    node = event.node
    known = cycle.nodes.get(node.name) or NodeState(node)
    lost = "" if node.ready else known.lost
    cycle.nodes[node.name] = _faulty(cycle, replace(known, node=node, lost=lost, removed=False))


def _faulty(cycle: CycleState, state: NodeState) -> NodeState:
    """The state with its hardware fault brought up to date: one that is over is remembered."""
    before = cycle.nodes.get(state.node.name)
    if state.node.fault:
        return replace(state, fault=state.node.fault, fault_at=cycle.now)
    if before is not None and before.node.fault:
        return replace(state, fault_at=cycle.now)
    return state


@react.register(happened.NodeRemoved)
def _(event: happened.NodeRemoved, cycle: CycleState) -> None:
    known = cycle.nodes.get(event.node)
    if known is None:
        return
    reason = "the Node object was deleted" if event.lost else "the node left the scheduler's care"
    lost = known.lost or ("NodeDeleted" if event.lost else "")
    node = replace(known.node, ready=False, reason=reason)
    cycle.nodes[event.node] = replace(known, node=node, lost=lost, removed=True)


@react.register(happened.NodeLost)
def _(event: happened.NodeLost, cycle: CycleState) -> None:
    known = cycle.nodes.get(event.node)
    if known is not None and not known.lost:
        cause = f"{event.cause} ({event.evidence})" if event.evidence else event.cause
        node = replace(known.node, ready=False, reason=cause)
        cycle.nodes[event.node] = replace(known, node=node, lost=cause or "lost")


@react.register(happened.NodeEmptied)
def _(event: happened.NodeEmptied, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None:
        return
    left = tuple(
        one for one in job.status.occupied if one.name != event.node or one.attempt > event.attempt
    )
    if left == job.status.occupied:
        return
    vanished = (
        job.status.phase in ACTIVE
        and event.attempt == job.status.history.attempt
        and job.status.assignment is not None
        and event.node in job.status.assignment.names
        and all(one.node != event.node for one in job.status.exits)
    )
    if vanished:
        _record_exit(cycle, event.job, event.node, happened.Killed(0, "vanished"))
    stops = {name: stop for name, stop in job.sent.stops.items() if name != event.node}
    cycle.put(replace(cycle.jobs[event.job], sent=replace(job.sent, stops=stops)))
    cycle.update(event.job, occupied=left)


@react.register(happened.ZonesObserved)
def _(event: happened.ZonesObserved, cycle: CycleState) -> None:
    cycle.zones = event.zones


@react.register(happened.QuotaObserved)
def _(event: happened.QuotaObserved, cycle: CycleState) -> None:
    cycle.quotas[event.quota.name] = event.quota


@react.register(happened.QuotaRemoved)
def _(event: happened.QuotaRemoved, cycle: CycleState) -> None:
    cycle.quotas.pop(event.quota, None)


@react.register(happened.TeamObserved)
def _(event: happened.TeamObserved, cycle: CycleState) -> None:
    if event.team:
        cycle.teams[event.namespace] = event.team
    else:
        cycle.teams.pop(event.namespace, None)


@react.register(happened.JobSubmitted)
def _(event: happened.JobSubmitted, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job.key)
    fresh = transitions.new_job(event.job, cycle.now)
    if job is None or (_forgotten(job) and fresh.status.history.id != job.status.history.id):
        cycle.put(fresh)
        # Nobody kept nodes for a job that is not known, whatever its status says.
        transitions.resubmit(cycle, fresh.key, fresh.status.occupied)
        return
    if job.removed and job.status.history.id == fresh.status.history.id:
        back = cycle.previous_jobs.get(job.key)
        if back is None or back.removed or back.ended:
            cycle.put(replace(fresh, sent=Sent(stops=job.sent.stops, token=job.sent.token)))
            transitions.resubmit(cycle, job.key, job.status.occupied)
            return
        # It went and came within this step: nothing has been ended yet.
        job = cycle.put(back)
    if job.ended or job.removed:
        return
    spec = event.job.spec
    queue = event.job.queue
    if job.status.phase not in (Phase.QUEUED, Phase.SUSPENDED):
        queue = job.queue  # what it holds counts where it was given
        # What decides the placement is fixed while the job has nodes.
        spec = job.spec.replace(
            priority=spec.priority,
            active_deadline=_lower(job.spec.active_deadline, spec.active_deadline),
            progress_deadline=spec.progress_deadline,
            max_restarts=spec.max_restarts,
            preemption=spec.preemption,
            suspend=spec.suspend,
            stop=spec.stop,
        )
    job = replace(
        job,
        spec=spec,
        queue=queue,
        suspend=spec.suspend,
        requeue=event.job.requeue_attempt,
        generation=event.job.metadata.generation,
    )
    if spec.suspend or spec.stop or job.requeue is not None:
        by, why = event.job.changed_by, event.job.change_reason
        job = replace(job, suspend_by=by, suspend_reason=why)
    cycle.put(job)


def _lower(held: Duration | None, asked: Duration | None) -> Duration | None:
    """The limit of a job that has nodes is only lowered: it may have them for its early end."""
    if held is None or (asked is not None and asked < held):
        return asked
    return held


@react.register(happened.JobRemoved)
def _(event: happened.JobRemoved, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None:
        return
    cycle.put(replace(job, removed=True))
    if not job.ended:
        transitions.end(cycle, event.job, Phase.FAILED, "Removed", "the job was deleted")


@react.register(happened.JobQuarantined)
def _(event: happened.JobQuarantined, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None:
        return
    holding = quotas.held_by(cycle, job)
    if holding is not None:
        cycle.quarantined = (*cycle.quarantined, holding)
    cycle.remove_job(event.job)


@react.register(happened.SuspendRequested)
def _(event: happened.SuspendRequested, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is not None:
        cycle.put(replace(job, suspend=True, suspend_by=event.by, suspend_reason=event.reason))


@react.register(happened.ResumeRequested)
def _(event: happened.ResumeRequested, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is not None:
        cycle.put(replace(job, suspend=False))


@react.register(happened.RequeueRequested)
def _(event: happened.RequeueRequested, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is not None:
        cycle.put(
            replace(job, requeue=event.attempt, suspend_by=event.by, suspend_reason=event.reason)
        )


@react.register(happened.StopRequested)
def _(event: happened.StopRequested, cycle: CycleState) -> None:
    if event.job in cycle.jobs:
        transitions.stop(cycle, event.job, by=event.by, reason=event.reason, kill=event.kill)


@react.register(happened.SuspendReceived)
def _(event: happened.SuspendReceived, cycle: CycleState) -> None:
    _grow_code(cycle, event.job, event.attempt, SuspendCode.RECEIVED)


@react.register(happened.Released)
def _(event: happened.Released, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt):
        return
    if job.status.phase is not Phase.SUSPENDING:
        transitions.request_suspension(
            cycle, event.job, reason="Yielded", by=event.job, message="the job gave its nodes back"
        )
    _grow_code(cycle, event.job, event.attempt, SuspendCode.MAY_SUSPEND)


@react.register(happened.ProgressReported)
def _(event: happened.ProgressReported, cycle: CycleState) -> None:
    job = _active(cycle, event.job, event.attempt)
    if job is None:
        return
    cycle.put(replace(job, seen=replace(job.seen, step=event.step)))
    if cycle.now >= job.seen.progress_committed_at + cycle.settings.progress_commit_seconds:
        transitions.flush_progress(cycle, event.job)
    transitions.extend_grace(cycle, event.job)


@react.register(happened.LogObserved)
def _(event: happened.LogObserved, cycle: CycleState) -> None:
    _active(cycle, event.job, event.attempt)


@react.register(happened.CheckpointReported)
def _(event: happened.CheckpointReported, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None or event.attempt != job.status.history.attempt:
        return
    _active(cycle, event.job, event.attempt)
    if event.durable:
        history = job.status.history
        cycle.update(
            event.job,
            checkpoint=Checkpoint(step=event.step, time=cycle.now, path=event.path),
            # It works where it is: nothing is held against the nodes of before any more.
            history=history.replace(avoid=()) if history.avoid else history,
        )
        if job.status.assignment is not None:
            transitions.record_nodes(cycle, event.job)
    transitions.extend_grace(cycle, event.job)


@react.register(happened.UserStateSet)
def _(event: happened.UserStateSet, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    valid = 0 <= event.value <= LIFE_STATE_MAX
    if valid and job is not None and event.attempt == job.status.history.attempt:
        cycle.update(event.job, history=job.status.history.replace(user_state=event.value))


@react.register(happened.GangStarted)
def _(event: happened.GangStarted, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.status.phase is not Phase.STARTING:
        return
    assert job.status.assignment is not None, event.job
    _active(cycle, event.job, event.attempt)
    cycle.update(
        event.job,
        phase=Phase.RUNNING,
        assignment=job.status.assignment.replace(running_at=cycle.now),
    )
    transitions.reset_refusals(cycle, event.job)
    incidents.record(cycle, "up", job)
    for name in job.status.assignment.names:
        state = cycle.nodes.get(name)
        if state is not None and state.start_failures:
            cycle.nodes[name] = replace(state, start_failures=())
    if job.status.checkpoint is None:
        transitions.record_nodes(cycle, event.job)


@react.register(happened.StartPending)
def _(event: happened.StartPending, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is not None and _is_starting(job, event.attempt):
        cycle.put(replace(job, seen=replace(job.seen, absent=event.nodes)))


@react.register(happened.StartFailed)
def _(event: happened.StartFailed, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None or not _is_starting(job, event.attempt) or job.status.assignment is None:
        return
    culprits = [name for name in job.status.assignment.names if name in event.nodes]
    if event.job_fault:
        culprits = []  # it fails everywhere
    else:
        transitions.suspect_nodes(cycle, event.job, culprits)
        incidents.record(cycle, "start", job)
    transitions.restart(
        cycle, event.job, reason="StartFailed", message=event.reason, avoid=culprits,
        counted=event.job_fault, slow=True,
    )  # fmt: skip


@react.register(happened.StreamLost)
def _(event: happened.StreamLost, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.seen.stream_lost_at is not None:
        return
    cycle.put(replace(job, seen=replace(job.seen, stream_lost_at=cycle.now)))


@react.register(happened.StreamRestored)
def _(event: happened.StreamRestored, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.seen.stream_lost_at is None:
        return
    # The time without a stream is not silence of the job.
    alive_at = job.seen.activity_at + (cycle.now - job.seen.stream_lost_at)
    seen = replace(job.seen, stream_lost_at=None, activity_at=min(cycle.now, alive_at))
    cycle.put(replace(job, seen=seen))


@react.register(happened.StartRefused)
def _(event: happened.StartRefused, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is not None and _is_starting(job, event.attempt):
        transitions.refuse_start(cycle, event.job, event.reason)


@react.register(happened.PodExited)
def _(event: happened.PodExited, cycle: CycleState) -> None:
    job = cycle.jobs.get(event.job)
    if job is None or not _is_live(job, event.attempt) or job.status.assignment is None:
        return
    known = any(one.node == event.node for one in job.status.exits)
    if not known and event.node in job.status.assignment.names:
        _record_exit(cycle, event.job, event.node, event.outcome)


def _record_exit(cycle: CycleState, key: str, node: str, outcome: happened.Outcome) -> None:
    exits = cycle.jobs[key].status.exits
    # One is enough for people, and a gang's would not fit into its object.
    told = any(one.traceback for one in exits)
    words = readable(getattr(outcome, "traceback", ""))
    reason = getattr(outcome, "reason", "") if len(exits) < EXITS_WITH_REASON_MAX else ""
    recorded = Exit(
        node=node,
        outcome=_OUTCOMES[type(outcome)],  # type: ignore[arg-type]
        exit_status=getattr(outcome, "exit_status", None),
        signal=getattr(outcome, "signal", None),
        reason=readable(reason)[:REASON_CHARS_MAX],
        rank=getattr(outcome, "rank", None),
        traceback=None if told else words[-TRACEBACK_CHARS_MAX:] or None,
        time=cycle.now,
    )
    cycle.update(key, exits=(*exits, recorded))


def _is_starting(job: JobState, attempt: int) -> bool:
    return job.status.phase is Phase.STARTING and job.status.history.attempt == attempt


def _is_live(job: JobState, attempt: int) -> bool:
    return job.status.phase in _LIVE and job.status.history.attempt == attempt


def _active(cycle: CycleState, key: str, attempt: int) -> JobState | None:
    """Return the job with its progress deadline restarted if this attempt is alive."""
    job = cycle.jobs.get(key)
    if job is None or not _is_live(job, attempt):
        return None
    return cycle.put(replace(job, seen=replace(job.seen, activity_at=cycle.now)))


def _grow_code(cycle: CycleState, key: str, attempt: int, code: SuspendCode) -> None:
    job = cycle.jobs.get(key)
    if job is None or job.status.phase is not Phase.SUSPENDING:
        return
    if job.status.history.attempt == attempt and job.status.suspend_code < code:
        cycle.update(key, suspend_code=code)


def _forgotten(job: JobState) -> bool:
    return job.ended and not job.status.occupied


__all__ = ["LIFE_STATE_MAX", "react"]

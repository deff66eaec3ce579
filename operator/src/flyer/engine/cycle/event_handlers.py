"""Event handlers: record what each event changes. `reconcile` decides what follows from it.

Because a handler only records facts, the order of events within one step does not matter, and a
rebuilt state leads to the same decisions. Handlers of events about attempts are in
`attempt_event_handlers`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.api import Phase
from flyer.api.mutability import CHANGEABLE_FIELDS
from flyer.engine import events
from flyer.engine.cycle.attempt_event_handlers import ATTEMPT_HANDLERS
from flyer.engine.quota.snapshot import holding_of
from flyer.engine.state import restarts, transitions
from flyer.engine.state.jobs import SentActions
from flyer.engine.state.nodes import NodeState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.api import Duration
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


def handle_event(event: events.Event, cycle: CycleState) -> None:
    """Record one event."""
    _HANDLERS[type(event)](event, cycle)


def handle_tick(_event: events.Tick, _cycle: CycleState) -> None:
    """Nothing to record."""


# -- cluster objects ------------------------------------------------------------------------------


def handle_node_observed(event: events.NodeObserved, cycle: CycleState) -> None:
    """Record the node. A ready node is not lost any more."""
    node = event.node
    node_state = cycle.nodes.get(node.name) or NodeState(node)
    loss = "" if node.ready else node_state.lost
    cycle.nodes[node.name] = _with_fault(
        cycle, replace(node_state, node=node, lost=loss, removed=False)
    )


def _with_fault(cycle: CycleState, state: NodeState) -> NodeState:
    """The state with its latest hardware fault, which is remembered after it is over."""
    before = cycle.nodes.get(state.node.name)
    if state.node.fault:
        return replace(state, fault=state.node.fault, fault_at=cycle.now)
    if before is not None and before.node.fault:
        return replace(state, fault_at=cycle.now)
    return state


def handle_node_removed(event: events.NodeRemoved, cycle: CycleState) -> None:
    """Record that the node gets no more work, and whether its pods are lost."""
    node_state = cycle.nodes.get(event.node)
    if node_state is None:
        return
    reason = (
        "the Node object was deleted"
        if event.lost
        else "the node has lost its labels for the scheduler"
    )
    loss = node_state.lost or ("NodeDeleted" if event.lost else "")
    node = replace(node_state.node, ready=False, reason=reason)
    cycle.nodes[event.node] = replace(node_state, node=node, lost=loss, removed=True)


def handle_node_lost(event: events.NodeLost, cycle: CycleState) -> None:
    """Record the loss and its cause."""
    node_state = cycle.nodes.get(event.node)
    if node_state is not None and not node_state.lost:
        cause = f"{event.cause} ({event.evidence})" if event.evidence else event.cause
        node = replace(node_state.node, ready=False, reason=cause)
        cycle.nodes[event.node] = replace(node_state, node=node, lost=cause or "lost")


def handle_zones_observed(event: events.ZonesObserved, cycle: CycleState) -> None:
    """Record the topology."""
    cycle.zones = event.zones


def handle_quota_observed(event: events.QuotaObserved, cycle: CycleState) -> None:
    """Record the quota."""
    cycle.quotas[event.quota.name] = event.quota


def handle_quota_removed(event: events.QuotaRemoved, cycle: CycleState) -> None:
    """Remove the quota."""
    cycle.quotas.pop(event.quota, None)


def handle_team_observed(event: events.TeamObserved, cycle: CycleState) -> None:
    """Record the team of the namespace."""
    if event.team:
        cycle.teams[event.namespace] = event.team
    else:
        cycle.teams.pop(event.namespace, None)


# -- jobs and requests of users -------------------------------------------------------------------


def handle_job_submitted(event: events.JobSubmitted, cycle: CycleState) -> None:
    """Add the job, or apply its changed specification."""
    job = cycle.jobs.get(event.job.key)
    submitted = transitions.new_job(event.job, cycle.now)
    same_history = job is not None and submitted.status.history.id == job.status.history.id
    if job is None or (_has_ended_everywhere(job) and not same_history):
        cycle.put(submitted)
        # The engine has reserved no nodes for an unknown job, whatever its status contains.
        restarts.resubmit(cycle, submitted.key, submitted.status.occupied)
        return
    if job.removed and same_history:
        previous = cycle.previous_jobs.get(job.key)
        if previous is None or previous.removed or previous.ended:
            actions = SentActions(stops=job.sent_actions.stops, token=job.sent_actions.token)
            cycle.put(replace(submitted, sent_actions=actions))
            restarts.resubmit(cycle, job.key, job.status.occupied)
            return
        # Removed and submitted again within this step: no action has ended anything yet.
        job = cycle.put(previous)
    if not (job.ended or job.removed):
        _apply_specification(cycle, job, event)


def _has_ended_everywhere(job: JobState) -> bool:
    return job.ended and not job.status.occupied


def _apply_specification(cycle: CycleState, job: JobState, event: events.JobSubmitted) -> None:
    spec = event.job.spec
    queue = event.job.queue
    if not job.status.phase.idle:
        queue = job.queue  # the quotas that admitted it stay charged
        # Fields that decide the placement are fixed while the job has nodes.
        changes = {name: getattr(spec, name) for name in CHANGEABLE_FIELDS}
        changes["active_deadline"] = _lower(job.spec.active_deadline, spec.active_deadline)
        spec = job.spec.replace(**changes)
    job = replace(
        job,
        spec=spec,
        queue=queue,
        suspend=spec.suspend,
        requeue=event.job.requeue_attempt,
        generation=event.job.metadata.generation,
    )
    if spec.suspend or spec.stop or job.requeue is not None:
        job = replace(job, suspend_by=event.job.changed_by, suspend_reason=event.job.change_reason)
    cycle.put(job)


def _lower(current: Duration | None, requested: Duration | None) -> Duration | None:
    """The deadline of a job that has nodes can only be lowered: backfill relied on it."""
    if current is None or (requested is not None and requested < current):
        return requested
    return current


def handle_job_removed(event: events.JobRemoved, cycle: CycleState) -> None:
    """End the job; it is dropped once its nodes are empty."""
    job = cycle.jobs.get(event.job)
    if job is None:
        return
    cycle.put(replace(job, removed=True))
    if not job.ended:
        transitions.end(cycle, event.job, Phase.FAILED, "Removed", "the job was deleted")


def handle_job_quarantined(event: events.JobQuarantined, cycle: CycleState) -> None:
    """Drop the job, and keep what it holds in its quotas."""
    job = cycle.jobs.get(event.job)
    if job is None:
        return
    holding = holding_of(cycle, job)
    if holding is not None:
        cycle.quarantined = (*cycle.quarantined, holding)
    cycle.remove_job(event.job)


def handle_suspend_requested(event: events.SuspendRequested, cycle: CycleState) -> None:
    """Record that the job is to be suspended."""
    job = cycle.jobs.get(event.job)
    if job is not None:
        cycle.put(replace(job, suspend=True, suspend_by=event.by, suspend_reason=event.reason))


def handle_resume_requested(event: events.ResumeRequested, cycle: CycleState) -> None:
    """Record that the job may run."""
    job = cycle.jobs.get(event.job)
    if job is not None:
        cycle.put(replace(job, suspend=False))


def handle_requeue_requested(event: events.RequeueRequested, cycle: CycleState) -> None:
    """Record that this attempt is to queue again."""
    job = cycle.jobs.get(event.job)
    if job is not None:
        cycle.put(
            replace(job, requeue=event.attempt, suspend_by=event.by, suspend_reason=event.reason)
        )


def handle_stop_requested(event: events.StopRequested, cycle: CycleState) -> None:
    """Start to end the job."""
    if event.job in cycle.jobs:
        transitions.stop(cycle, event.job, by=event.by, reason=event.reason, kill=event.kill)


_HANDLERS: Mapping[type, Callable[[Any, CycleState], None]] = {
    events.Tick: handle_tick,
    events.NodeObserved: handle_node_observed,
    events.NodeRemoved: handle_node_removed,
    events.NodeLost: handle_node_lost,
    events.ZonesObserved: handle_zones_observed,
    events.QuotaObserved: handle_quota_observed,
    events.QuotaRemoved: handle_quota_removed,
    events.TeamObserved: handle_team_observed,
    events.JobSubmitted: handle_job_submitted,
    events.JobRemoved: handle_job_removed,
    events.JobQuarantined: handle_job_quarantined,
    events.SuspendRequested: handle_suspend_requested,
    events.ResumeRequested: handle_resume_requested,
    events.RequeueRequested: handle_requeue_requested,
    events.StopRequested: handle_stop_requested,
    **ATTEMPT_HANDLERS,
}

__all__ = ["handle_event"]

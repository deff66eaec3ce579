"""Handlers of events about jobs: submissions, changed specifications and requests of users."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.api import Phase
from flyer.api.mutability import CHANGEABLE_FIELDS
from flyer.engine import events
from flyer.engine.quota.snapshot import holding_of
from flyer.engine.state import restarts, transitions
from flyer.engine.state.jobs import SentActions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.api import Duration
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


def handle_job_submitted(event: events.JobSubmitted, cycle: CycleState) -> None:
    """Add the job, or apply its changed specification."""
    job = cycle.jobs.get(event.job.key)
    submitted = transitions.new_job(event.job, cycle.now)
    same_history = job is not None and submitted.status.history.id == job.status.history.id
    same_object = job is not None and submitted.uid == job.uid
    if job is None or (_has_ended_everywhere(job) and not same_history):
        cycle.put(submitted)
        # The engine has reserved no nodes for an unknown job, whatever its status contains.
        restarts.resubmit(cycle, submitted.key, submitted.status.occupied)
        return
    if job.removed and same_history:
        previous = cycle.previous_jobs.get(job.key)
        if previous is None or previous.removed or previous.ended or not same_object:
            actions = SentActions(stops=job.sent_actions.stops, token=job.sent_actions.token)
            cycle.put(replace(submitted, sent_actions=actions))
            restarts.resubmit(cycle, job.key, job.status.occupied)
            return
        # Removed and submitted again within this step: no action has ended anything yet.
        job = cycle.put(previous)
    if same_object and not (job.ended or job.removed):
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


JOB_HANDLERS: Mapping[type, Callable[[Any, CycleState], None]] = {
    events.JobSubmitted: handle_job_submitted,
    events.JobRemoved: handle_job_removed,
    events.JobQuarantined: handle_job_quarantined,
    events.SuspendRequested: handle_suspend_requested,
    events.ResumeRequested: handle_resume_requested,
    events.RequeueRequested: handle_requeue_requested,
    events.StopRequested: handle_stop_requested,
}

__all__ = ["JOB_HANDLERS"]

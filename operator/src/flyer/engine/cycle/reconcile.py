"""Reconcile: move each job to the phase that its facts and the time call for, before scheduling.

Each phase has a list of rules. The first rule that applies moves the job, and then the rules of its
next phase are applied until nothing moves. Rules look at levels, not at events, so a rebuilt state
reconciles to the same phases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase, StopMode, SuspendCode, quantize
from flyer.engine.cycle import failure_causes
from flyer.engine.state import restarts, transitions
from flyer.engine.state.jobs import WAITING, JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.engine.cycle.failure_causes import FailureCause
    from flyer.engine.state.cycle_state import CycleState


# A job passes through each phase at most once in a step.
_MOVES_MAX = 8


def reconcile(cycle: CycleState) -> None:
    """Apply the rules to every job until no phase changes."""
    active = cycle.active_jobs().values()
    occupied_by = cycle.occupied_by() if any(job.status.phase in WAITING for job in active) else {}
    failure_causes.record_failures(cycle)
    for key in _to_reconcile(cycle):
        cycle.current_job = key
        for _ in range(_MOVES_MAX):
            job = cycle.jobs[key]
            rule = _RULES.get(job.status.phase)
            if rule is None:
                break
            rule(cycle, job)
            if cycle.jobs[key].status.phase is job.status.phase:
                break
        else:
            raise AssertionError(f"{key} does not converge")
    cycle.current_job = ""
    _confirm_reservations(cycle, occupied_by)


def _to_reconcile(cycle: CycleState) -> list[str]:
    active = cycle.active_jobs().items()
    return sorted(key for key, job in active if not (_is_idle(job) or cycle.may_skip(job)))


def _is_idle(job: JobState) -> bool:
    """Whether no rule applies to a queued job, as to most jobs of a long queue."""
    return (
        job.status.phase is Phase.QUEUED
        and not job.suspend
        and job.spec.stop is None
        and job.generation == job.status.observed_generation
    )


def _stopped(cycle: CycleState, job: JobState) -> bool:
    """Stop the job if spec.stop is set."""
    if job.spec.stop is None:
        return False
    kill = job.spec.stop is StopMode.NOW
    transitions.stop(cycle, job.key, by=job.suspend_by, reason=job.suspend_reason, kill=kill)
    return True


def _queued(cycle: CycleState, job: JobState) -> None:
    if _stopped(cycle, job):
        return
    if job.suspend:
        cycle.update(job.key, phase=Phase.SUSPENDED, pending=None)
    elif job.generation != job.status.observed_generation:
        restarts.reset_refusals(cycle, job.key)


def _suspended(cycle: CycleState, job: JobState) -> None:
    if _stopped(cycle, job):
        return
    if not job.suspend:
        history = job.status.history.replace(queued_at=cycle.now, not_before=None, refusals=0)
        cycle.update(job.key, phase=Phase.QUEUED, history=history)


def _waiting(cycle: CycleState, job: JobState) -> None:
    assignment = job.status.assignment
    assert assignment is not None, f"{job.key}: reserved without nodes"
    if _stopped(cycle, job):
        return
    unfit = [name for name in assignment.names if not _fit(cycle, name)]
    if job.suspend or unfit:
        transitions.drop_reservation(cycle, job.key)


def _fit(cycle: CycleState, name: str) -> bool:
    state = cycle.nodes.get(name)
    return state is not None and state.eligible


def _active(cycle: CycleState, job: JobState) -> None:
    """Starting or running: first failures and exits, then requests, then deadlines."""
    for rule in (_infrastructure, _ended, _interrupted_by_request, _drained, _overdue):
        if rule(cycle, job):
            return
    _show_progress(cycle, job)


def _show_progress(cycle: CycleState, job: JobState) -> None:
    """Commit a step that was reported during the commit interval, once the interval ends.

    The job may pause after it, and a new leader receives it only once.
    """
    published, observed = job.status.progress, job.observed
    if observed.step is None or (published is not None and published.step == observed.step):
        return
    if cycle.passed(observed.progress_committed_at + cycle.settings.progress_commit_seconds):
        transitions.flush_progress(cycle, job.key)


def _infrastructure(cycle: CycleState, job: JobState) -> bool:
    cause = failure_causes.infrastructure(cycle, job)
    if cause is None:
        return False
    _restart(cycle, job, cause)
    return True


def _restart(cycle: CycleState, job: JobState, cause: FailureCause) -> None:
    counted, message = failure_causes.assess(cycle, cause)
    if cause.reason == "PodsReadyTimeout":
        restarts.suspect_nodes(cycle, job.key, cause.avoid)
    restarts.restart(
        cycle, job.key, reason=cause.reason, message=message, avoid=cause.avoid,
        counted=counted, slow=cause.kind == "start", by_signal=cause.signal,
    )  # fmt: skip


def _ended(cycle: CycleState, job: JobState) -> bool:
    assignment, exits = job.status.assignment, job.status.exits
    assert assignment is not None, f"{job.key}: active without nodes"
    all_exited = len(exits) == len(assignment.nodes)
    failed = [exited for exited in exits if exited.outcome == "Failed"]
    if not failed:
        if all_exited:
            message = f"all ranks of {len(exits)} nodes exited with status 0"
            transitions.end(cycle, job.key, Phase.SUCCEEDED, "Complete", message)
        return all_exited
    verdict_at = quantize(failed[0].time + cycle.settings.failure_window_seconds)
    if not all_exited and cycle.now < verdict_at:
        cycle.wake(verdict_at)
        return True  # no other rule applies while evidence may still arrive
    first = failed[0]
    detail = f": {first.reason}" if first.reason else ""
    transitions.end(
        cycle, job.key, Phase.FAILED, "RankFailed",
        f"a rank on node {first.node} exited with status {first.exit_status}{detail}",
    )  # fmt: skip
    return True


def _interrupted_by_request(cycle: CycleState, job: JobState) -> bool:
    if _stopped(cycle, job):
        return True
    requeue = job.requeue == job.status.history.attempt
    if not job.suspend and not requeue:
        return False
    reason = "Suspended" if job.suspend else "Requeued"
    message = f"{reason.lower()} by {job.suspend_by}"
    if job.suspend_reason:
        message += f": {job.suspend_reason}"
    transitions.request_suspension(
        cycle, job.key, reason=reason, by=job.suspend_by, message=message
    )
    return True


def _drained(cycle: CycleState, job: JobState) -> bool:
    """Suspend a gang of which a node is drained; it is placed on other nodes afterwards."""
    assignment = job.status.assignment
    assert assignment is not None, f"{job.key}: active without nodes"
    for name in assignment.names:
        state = cycle.nodes.get(name)
        if state is not None and state.node.drain:
            transitions.request_suspension(
                cycle, job.key, reason="NodeDrained", by="NodeHealth",
                message=f"node {name} is {state.node.drain}",
            )  # fmt: skip
            return True
    return False


def _overdue(cycle: CycleState, job: JobState) -> bool:
    assignment, spec = job.status.assignment, job.spec
    assert assignment is not None, f"{job.key}: active without nodes"
    cause = failure_causes.start_overdue(cycle, job)
    if cause is not None:
        _restart(cycle, job, cause)
        return True
    if assignment.running_at is None:
        return False
    if spec.active_deadline and cycle.passed(assignment.running_at + spec.active_deadline.seconds):
        transitions.request_suspension(
            cycle, job.key, reason="DeadlineExceeded", by="activeDeadline",
            message=f"ran for its activeDeadline of {spec.active_deadline}",
        )  # fmt: skip
        return True
    cause = failure_causes.progress_deadline_exceeded(cycle, job)
    if cause is not None:
        _restart(cycle, job, cause)
        return True
    return False


def _suspending(cycle: CycleState, job: JobState) -> None:
    suspension, assignment = job.status.suspension, job.status.assignment
    assert suspension is not None, f"{job.key}: suspending without a suspension"
    assert assignment is not None, f"{job.key}: suspending without nodes"
    finished = len(job.status.exits) == len(assignment.nodes) and all(
        exited.outcome == "Succeeded" for exited in job.status.exits
    )
    # It ended before it received the signal. Afterwards, exit status 0 would mean that it saved.
    if finished and job.status.suspend_code <= SuspendCode.SENT and not suspension.expired:
        message = f"all ranks of {len(job.status.exits)} nodes exited with status 0"
        transitions.end(cycle, job.key, Phase.SUCCEEDED, "Complete", message)
        return
    if all(cycle.has_left(job, node.name) for node in job.status.occupied):
        transitions.end_suspension(cycle, job.key)
        return
    if _stopped(cycle, job):
        job = cycle.jobs[job.key]
        suspension = job.status.suspension
        assert suspension is not None, f"{job.key}: suspending without a suspension"
    released = job.status.suspend_code is SuspendCode.MAY_SUSPEND
    if not released and not suspension.expired and cycle.passed(suspension.deadline):
        cycle.update(job.key, suspension=suspension.replace(expired=True))


_RULES: dict[Phase, Callable[[CycleState, JobState], None]] = {
    Phase.QUEUED: _queued,
    Phase.SUSPENDED: _suspended,
    Phase.RESERVED: _waiting,
    Phase.DRAINING: _waiting,
    Phase.STARTING: _active,
    Phase.RUNNING: _active,
    Phase.SUSPENDING: _suspending,
}


def _confirm_reservations(cycle: CycleState, occupied_by: dict[str, str]) -> None:
    """Drop reservations of nodes whose holder is not leaving, or has not left in time."""
    active = cycle.active_jobs().items()
    for key in sorted(key for key, job in active if job.status.phase in WAITING):
        job = cycle.jobs[key]
        if job.status.assignment is None:
            continue
        for name in job.status.assignment.names:
            holder = cycle.jobs.get(occupied_by.get(name, ""))
            if holder is None or name not in {node.name for node in holder.status.occupied}:
                continue
            staying = holder.status.phase in (Phase.STARTING, Phase.RUNNING)
            if staying or cycle.has_left(holder, name):
                transitions.drop_reservation(cycle, key)
                break


__all__ = ["reconcile"]

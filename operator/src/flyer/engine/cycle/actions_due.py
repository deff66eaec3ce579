"""Actions from levels: what each job's status calls for and this process has not yet told.

Nothing here decides; it compares the status with `Sent`. So after a rebuild, when `Sent` is empty,
everything that is still to be done is told again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyer.api import Phase, SuspendCode, quantize
from flyer.engine.actions import Action, Finish, HoldToken, ReleaseToken, Signal, Start, Stop
from flyer.engine.state.jobs import ACTIVE, JobState

if TYPE_CHECKING:
    from flyer.engine.state.cycle_state import CycleState


def derive_actions(cycle: CycleState) -> list[Action]:
    """Everything to be done now, in the order in which it is to be done."""
    released: list[Action] = []
    stopped: list[Action] = []
    signalled: list[Action] = []
    started: list[Action] = []
    finished: list[Action] = []
    active = cycle.active_jobs().items()
    for key in sorted(key for key, job in active if not (_is_idle(job) or cycle.may_skip(job))):
        cycle.current_job = key
        released += _release_token(cycle, cycle.jobs[key])
        stopped += _stops(cycle, cycle.jobs[key])
        signalled += _signal(cycle, cycle.jobs[key])
        started += _start(cycle, cycle.jobs[key])
        finished += _finish(cycle, cycle.jobs[key])
    cycle.current_job = ""
    return released + stopped + signalled + started + finished


def _is_idle(job: JobState) -> bool:
    """Whether nothing is to be done for a waiting job: most of a long queue."""
    status, sent = job.status, job.sent
    waits = status.phase is Phase.QUEUED or status.phase is Phase.SUSPENDED
    return waits and sent.token is False and not status.occupied and not sent.stops


def _release_token(cycle: CycleState, job: JobState) -> list[Action]:
    crosses = cycle.crosses_zones(job)
    held = job.sent.token
    if crosses or held is False:
        return []
    cycle.put(replace(job, sent=replace(job.sent, token=False)))
    # After a rebuild nobody knows whether the release was told: whoever had nodes tells it again.
    had_nodes = job.status.history.attempt > 0 and job.spec.nodes > 1
    return [ReleaseToken(job.key)] if held or had_nodes else []


def _stops(cycle: CycleState, job: JobState) -> list[Action]:
    nodes = _to_empty(job)
    stops = dict(job.sent.stops)
    due: dict[int, list[str]] = {}
    for name, attempt in nodes:
        known = stops.get(name)
        if known is None or known[0] != attempt:
            stops[name] = (attempt, cycle.now, cycle.now)
        elif cycle.is_lost(name):
            continue  # told once; again when the node is back
        elif cycle.now >= quantize(known[2] + cycle.settings.stop_retry_seconds):
            stops[name] = (attempt, known[1], cycle.now)
        else:
            cycle.wake(quantize(known[2] + cycle.settings.stop_retry_seconds))
            continue
        due.setdefault(attempt, []).append(name)
        cycle.wake(quantize(cycle.now + cycle.settings.stop_retry_seconds))
    wanted = {name for name, _ in nodes}
    stops = {name: stop for name, stop in stops.items() if name in wanted}
    if stops != job.sent.stops:
        cycle.put(replace(job, sent=replace(job.sent, stops=stops)))
    reason = job.status.reason or job.status.phase.value
    # A job that ended may write its last lines; what failed or overstayed has had its time.
    gentle = job.ended
    return [
        Stop(
            job.key,
            attempt,
            tuple(names),
            kill=not gentle or any(stops[name][1] < cycle.now for name in names),
            reason=reason,
        )
        for attempt, names in sorted(due.items())
    ]


def _to_empty(job: JobState) -> list[tuple[str, int]]:
    """Occupied nodes that nothing of the job has a reason to be on."""
    status = job.status
    occupied = [(node.name, node.attempt) for node in status.occupied]
    older = [one for one in occupied if one[1] < status.history.attempt]
    if status.phase in ACTIVE:
        return older
    if status.phase is Phase.SUSPENDING and status.suspension is not None:
        nodes = status.assignment.nodes if status.assignment else ()
        out = len(status.exits) == len(nodes)
        leaves = status.suspend_code is SuspendCode.MAY_SUSPEND or status.suspension.expired or out
        return occupied if leaves else older
    return occupied


def _signal(cycle: CycleState, job: JobState) -> list[Action]:
    status = job.status
    suspension = status.suspension
    if status.phase is not Phase.SUSPENDING or suspension is None or suspension.expired:
        return []
    mark = (status.history.attempt, suspension.deadline)
    if status.suspend_code is SuspendCode.MAY_SUSPEND or job.sent.signal == mark:
        return []
    cycle.put(replace(job, sent=replace(job.sent, signal=mark)))
    return [Signal(job.key, mark[0], suspension.deadline, suspension.reason, suspension.by)]


def _start(cycle: CycleState, job: JobState) -> list[Action]:
    status = job.status
    told: list[Action] = []
    runs = status.phase in ACTIVE or status.phase is Phase.SUSPENDING
    if runs and cycle.crosses_zones(job) and not job.sent.token:
        told.append(HoldToken(job.key))
        job = cycle.put(replace(job, sent=replace(job.sent, token=True)))
    if status.phase is Phase.STARTING and job.sent.start != status.history.attempt:
        assert status.assignment is not None, f"{job.key}: starts without nodes"
        cycle.put(replace(job, sent=replace(job.sent, start=status.history.attempt)))
        # It may be that nothing happens before the deadline: nobody else would look then.
        cycle.wake(quantize(cycle.now + cycle.settings.start_deadline_seconds))
        # A new leader sends it again. Not to nodes that a pod of the attempt has left already: they
        # count as empty, and an attempt with an exit before its start is over anyway.
        if not status.exits:
            told.append(
                Start(
                    job.key,
                    status.history.attempt,
                    status.assignment,
                    status.checkpoint,
                    status.history.user_state,
                )
            )
    return told


def _finish(cycle: CycleState, job: JobState) -> list[Action]:
    left = [node.name for node in job.status.occupied if not cycle.is_lost(node.name)]
    if not job.ended or left or job.sent.finish:
        return []
    cycle.put(replace(job, sent=replace(job.sent, finish=True)))
    return [Finish(job.key)]


__all__ = ["derive_actions"]

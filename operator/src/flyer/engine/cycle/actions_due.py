"""Actions due: what the status of each job requires and this process has not sent yet.

This module decides nothing: it compares the status with `SentActions`. After a rebuild
`SentActions` is empty, so every action that is still due is repeated.
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
    """All actions that are due, in the order in which drivers have to perform them."""
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
    """Whether the job only waits, as most jobs of a long queue do: no action is due."""
    status, actions = job.status, job.sent_actions
    waits = status.phase is Phase.QUEUED or status.phase is Phase.SUSPENDED
    return waits and actions.token is False and not status.occupied and not actions.stops


def _release_token(cycle: CycleState, job: JobState) -> list[Action]:
    crosses = cycle.crosses_zones(job)
    held_token = job.sent_actions.token
    if crosses or held_token is False:
        return []
    cycle.put(replace(job, sent_actions=replace(job.sent_actions, token=False)))
    # After a rebuild it is unknown whether the release was sent: repeat it if the job had nodes.
    had_nodes = job.status.history.attempt > 0 and job.spec.nodes > 1
    return [ReleaseToken(job.key)] if held_token or had_nodes else []


def _stops(cycle: CycleState, job: JobState) -> list[Action]:
    nodes = _to_empty(job)
    stops = dict(job.sent_actions.stops)
    stops_due: dict[int, list[str]] = {}
    for name, attempt in nodes:
        earlier_stop = stops.get(name)
        if earlier_stop is None or earlier_stop[0] != attempt:
            stops[name] = (attempt, cycle.now, cycle.now)
        elif cycle.is_lost(name):
            continue  # sent once; repeated when the node is ready again
        elif cycle.now >= quantize(earlier_stop[2] + cycle.settings.stop_retry_seconds):
            stops[name] = (attempt, earlier_stop[1], cycle.now)
        else:
            cycle.wake(quantize(earlier_stop[2] + cycle.settings.stop_retry_seconds))
            continue
        stops_due.setdefault(attempt, []).append(name)
        cycle.wake(quantize(cycle.now + cycle.settings.stop_retry_seconds))
    node_names = {name for name, _ in nodes}
    stops = {name: stop for name, stop in stops.items() if name in node_names}
    if stops != job.sent_actions.stops:
        cycle.put(replace(job, sent_actions=replace(job.sent_actions, stops=stops)))
    reason = job.status.reason or job.status.phase.value
    # A job that has ended may write its last log lines; others have had their grace period.
    gentle = job.ended
    return [
        Stop(
            job.key,
            attempt,
            tuple(names),
            kill=not gentle or any(stops[name][1] < cycle.now for name in names),
            reason=reason,
            uid=job.uid,
        )
        for attempt, names in sorted(stops_due.items())
    ]


def _to_empty(job: JobState) -> list[tuple[str, int]]:
    """Occupied nodes that the job has to leave."""
    status = job.status
    occupied = [(node.name, node.attempt) for node in status.occupied]
    older = [(name, attempt) for name, attempt in occupied if attempt < status.history.attempt]
    if status.phase in ACTIVE:
        return older
    if status.phase is Phase.SUSPENDING and status.suspension is not None:
        nodes = status.assignment.nodes if status.assignment else ()
        exited = len(status.exits) == len(nodes)
        released = status.suspend_code is SuspendCode.MAY_SUSPEND
        return occupied if released or status.suspension.expired or exited else older
    return occupied


def _signal(cycle: CycleState, job: JobState) -> list[Action]:
    status = job.status
    suspension = status.suspension
    if status.phase is not Phase.SUSPENDING or suspension is None or suspension.expired:
        return []
    mark = (status.history.attempt, suspension.deadline)
    if status.suspend_code is SuspendCode.MAY_SUSPEND or job.sent_actions.signal == mark:
        return []
    cycle.put(replace(job, sent_actions=replace(job.sent_actions, signal=mark)))
    deadline, reason, by = suspension.deadline, suspension.reason, suspension.by
    return [Signal(job.key, mark[0], deadline, reason, by, uid=job.uid)]


def _start(cycle: CycleState, job: JobState) -> list[Action]:
    status = job.status
    actions: list[Action] = []
    runs = status.phase in ACTIVE or status.phase is Phase.SUSPENDING
    if runs and cycle.crosses_zones(job) and not job.sent_actions.token:
        actions.append(HoldToken(job.key))
        job = cycle.put(replace(job, sent_actions=replace(job.sent_actions, token=True)))
    if status.phase is Phase.STARTING and job.sent_actions.start != status.history.attempt:
        assert status.assignment is not None, f"{job.key}: starts without nodes"
        cycle.put(
            replace(job, sent_actions=replace(job.sent_actions, start=status.history.attempt))
        )
        # Without another event the deadline itself has to cause a step.
        cycle.wake(quantize(cycle.now + cycle.settings.start_deadline_seconds))
        # A new leader repeats it, unless a pod of the attempt has exited: its node counts as empty,
        # and the attempt will be restarted.
        if not status.exits:
            actions.append(
                Start(
                    job.key,
                    status.history.attempt,
                    status.assignment,
                    status.checkpoint,
                    status.history.user_state,
                    uid=job.uid,
                )
            )
    return actions


def _finish(cycle: CycleState, job: JobState) -> list[Action]:
    remaining = [node.name for node in job.status.occupied if not cycle.is_lost(node.name)]
    if not job.ended or remaining or job.sent_actions.finish:
        return []
    cycle.put(replace(job, sent_actions=replace(job.sent_actions, finish=True)))
    return [Finish(job.key, uid=job.uid)]


__all__ = ["derive_actions"]

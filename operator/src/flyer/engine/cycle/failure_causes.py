"""Causes of failed attempts, and whether they count against the job.

The first cause decides: drivers report the exits of a gang in causal order. Evidence of the
infrastructure that arrives within the failure window outweighs a rank's exit: a lost node, a
hardware fault that NodeHealth reports, a pod that vanished or was killed from outside. A signal
that a process sends to itself after another rank failed (SIGABRT by a collective library) does not.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine.cycle import circuit_breaker
from flyer.engine.state.jobs import ACTIVE, JobState

if TYPE_CHECKING:
    from flyer.api import Exit
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.engine_state import IncidentKind

# Sent by a kernel that is out of memory, by a kubelet or by a person; never by the process itself.
_FROM_OUTSIDE = frozenset({0, signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why an attempt has to be restarted."""

    reason: str
    message: str
    avoid: tuple[str, ...] = ()
    kind: IncidentKind | None = None  # what the circuit breaker counts it as
    counted: bool = True  # against maxRestarts
    signal: int | None = None  # that ended it, if the same one again is the job's own fault


def infrastructure(cycle: CycleState, job: JobState) -> FailureCause | None:
    """What took the attempt's pods or nodes away, if something did."""
    assignment = job.status.assignment
    assert assignment is not None, f"{job.key}: active without nodes"
    done = {one.node for one in job.status.exits if one.outcome == "Succeeded"}
    lost = tuple(name for name in assignment.names if cycle.is_lost(name) and name not in done)
    faults = {name: fault for name in assignment.names if (fault := _fault(cycle, name))}
    if lost:
        causes = ", ".join(f"{name} ({_loss(cycle, name)})" for name in lost)
        hardware = not faults.keys().isdisjoint(lost)
        return FailureCause(
            "NodeFailures", f"lost node {causes}", lost, kind="run", counted=not hardware
        )
    ends = [one for one in job.status.exits if one.outcome != "Succeeded"]
    if not ends:
        return None
    if faults:
        named = ", ".join(f"{name} ({fault})" for name, fault in faults.items())
        return FailureCause(
            "HardwareFault",
            f"hardware fault of node {named}: {_end(ends[0])}",
            tuple(faults),
            counted=False,
        )
    killed = [
        end
        for end in ends
        if end.outcome == "Killed" and (end is ends[0] or (end.signal or 0) in _FROM_OUTSIDE)
    ]
    if not killed:
        return None
    by_signal = killed[0].signal or 0
    return FailureCause(
        "PodKilled",
        _end(killed[0]),
        # Without a signal nobody killed it there: whoever ran it went away.
        tuple(one.node for one in killed if one.signal),
        kind="run" if by_signal == 0 else None,
        signal=by_signal if _is_its_own(killed[0]) else None,
    )


def start_overdue(cycle: CycleState, job: JobState) -> FailureCause | None:
    """The start deadline passed: on which nodes, as far as is known."""
    assignment = job.status.assignment
    assert assignment is not None, f"{job.key}: active without nodes"
    if assignment.running_at is not None:
        return None
    begun = assignment.started_at if assignment.started_at is not None else cycle.now
    limit = cycle.settings.start_deadline_seconds
    if not cycle.passed(begun + limit):
        return None
    names = assignment.names
    absent = tuple(name for name in names if name in job.seen.absent)
    # Where all are missing, the nodes have nothing in common that the job has not.
    culprits = names if len(names) == 1 else absent if len(absent) < len(names) else ()
    where = f" on {', '.join(culprits[:_NAMES_MAX])}" if culprits else ""
    message = f"the pods were not up within {limit:g} s{where}"
    return FailureCause("PodsReadyTimeout", message, culprits, kind="start")


# Names in one sentence; a gang has thousands.
_NAMES_MAX = 8


def progress_deadline_exceeded(cycle: CycleState, job: JobState) -> FailureCause | None:
    """Neither progress nor output within the progress deadline while the job had a stream."""
    assignment, deadline = job.status.assignment, job.spec.progress_deadline
    assert assignment is not None, f"{job.key}: active without nodes"
    if deadline is None or assignment.running_at is None:
        return None
    alive_at = max(job.seen.activity_at, assignment.running_at)
    lost_at = job.seen.stream_lost_at
    if lost_at is None:
        if not cycle.passed(alive_at + deadline.seconds):
            return None
        return FailureCause(
            "ProgressDeadlineExceeded",
            f"neither progress nor a log line for {deadline}",
            kind="run",
        )
    # Nobody hears it. If that is so for many, the report path is broken, and silence is no sign.
    # Otherwise its own sidecars are: another progress deadline for them to come back.
    if many_unheard(cycle) or not cycle.passed(max(alive_at, lost_at) + 2 * deadline.seconds):
        return None
    return FailureCause(
        "ProgressDeadlineExceeded",
        f"its sidecars have had no stream for more than {deadline}, those of other jobs have",
        kind="run",
        counted=False,
    )


def many_unheard(cycle: CycleState) -> bool:
    """Whether most running jobs have no stream: the report path is broken, not the jobs."""
    running = [job for job in cycle.active_jobs().values() if job.status.phase is Phase.RUNNING]
    unheard = sum(job.seen.stream_lost_at is not None for job in running)
    return unheard >= cycle.settings.outage_jobs_min and 2 * unheard >= len(running)


def assess(cycle: CycleState, cause: FailureCause) -> tuple[bool, str]:
    """Whether the restart counts against the job, and the message to store."""
    outage = circuit_breaker.outage(cycle, cause.kind) if cause.kind is not None else ""
    if outage:
        return False, f"{cause.message}; {outage}"
    return cause.counted, cause.message


def record_failures(cycle: CycleState) -> None:
    """Record all failures of this step before any is assessed: many jobs may fail at once."""
    for key, job in sorted(cycle.active_jobs().items()):
        if job.status.phase not in ACTIVE or cycle.may_skip(job):
            continue
        cycle.current_job = key
        cause = (
            infrastructure(cycle, job)
            or start_overdue(cycle, job)
            or progress_deadline_exceeded(cycle, job)
        )
        if cause is not None and cause.kind is not None:
            circuit_breaker.record_incident(cycle, cause.kind, job)
    cycle.current_job = ""


def _is_its_own(one: Exit) -> bool:
    """Whether the same signal again would be the job's own doing: a crash, or too much memory."""
    crashed = one.signal not in _FROM_OUTSIDE
    return crashed or (one.signal == signal.SIGKILL and "oom" in one.reason.lower())


def _end(one: Exit) -> str:
    detail = f" ({one.reason})" if one.reason else ""
    if one.outcome == "Killed":
        how = f"by signal {one.signal}" if one.signal else "by nobody known"
        return f"the pod on node {one.node} was killed {how}{detail}"
    return f"a rank on node {one.node} exited with status {one.exit_status}{detail}"


def _loss(cycle: CycleState, name: str) -> str:
    state = cycle.nodes.get(name)
    return (state.node.reason or state.lost) if state else "not known any more"


def _fault(cycle: CycleState, name: str) -> str:
    """The hardware fault that the node has, or had shortly before."""
    state = cycle.nodes.get(name)
    if state is None or not state.fault:
        return ""
    recent = cycle.now - state.fault_at <= cycle.settings.hardware_fault_seconds
    return state.fault if state.node.fault or recent else ""


__all__ = [
    "FailureCause",
    "assess",
    "infrastructure",
    "many_unheard",
    "progress_deadline_exceeded",
    "record_failures",
    "start_overdue",
]

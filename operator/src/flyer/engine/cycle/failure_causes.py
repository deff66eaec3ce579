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

# Sent by the kernel (out of memory), a kubelet or a user, not raised by the process. Signal 0: the
# pod disappeared.
_FROM_OUTSIDE = frozenset({0, signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Cause of the restart of an attempt."""

    reason: str
    message: str
    avoid: tuple[str, ...] = ()
    kind: IncidentKind | None = None  # what the circuit breaker counts it as
    counted: bool = True  # against maxRestarts
    signal: int | None = None  # the job's own signal: repeated, it is the job's fault


def infrastructure(cycle: CycleState, job: JobState) -> FailureCause | None:
    """A failure of the attempt's nodes or pods from outside, if there is one."""
    assignment = job.status.assignment
    assert assignment is not None, f"{job.key}: active without nodes"
    succeeded = {exited.node for exited in job.status.exits if exited.outcome == "Succeeded"}
    lost_nodes = tuple(
        name for name in assignment.names if cycle.is_lost(name) and name not in succeeded
    )
    faults = {name: fault for name in assignment.names if (fault := _fault(cycle, name))}
    if lost_nodes:
        causes = ", ".join(f"{name} ({_loss(cycle, name)})" for name in lost_nodes)
        hardware = not faults.keys().isdisjoint(lost_nodes)
        return FailureCause(
            "NodeFailures", f"lost node {causes}", lost_nodes, kind="run", counted=not hardware
        )
    exits = [exited for exited in job.status.exits if exited.outcome != "Succeeded"]
    if not exits:
        return None
    if faults:
        named = ", ".join(f"{name} ({fault})" for name, fault in faults.items())
        return FailureCause(
            "HardwareFault",
            f"hardware fault of node {named}: {_describe(exits[0])}",
            tuple(faults),
            counted=False,
        )
    killed = [
        exited
        for exited in exits
        if exited.outcome == "Killed"
        and (exited is exits[0] or (exited.signal or 0) in _FROM_OUTSIDE)
    ]
    if not killed:
        return None
    by_signal = killed[0].signal or 0
    return FailureCause(
        "PodKilled",
        _describe(killed[0]),
        # A pod without a signal disappeared with the process that ran it: not the node's fault.
        tuple(exited.node for exited in killed if exited.signal),
        kind="run" if by_signal == 0 else None,
        signal=by_signal if _is_its_own(killed[0]) else None,
    )


def start_overdue(cycle: CycleState, job: JobState) -> FailureCause | None:
    """The exceeded start deadline, with the nodes that caused it as far as they are known."""
    assignment = job.status.assignment
    assert assignment is not None, f"{job.key}: active without nodes"
    if assignment.running_at is not None:
        return None
    started_at = assignment.started_at if assignment.started_at is not None else cycle.now
    limit = cycle.settings.start_deadline_seconds
    if not cycle.passed(started_at + limit):
        return None
    names = assignment.names
    absent = tuple(name for name in names if name in job.observed.absent)
    # If all pods are missing, the cause is not a single node.
    failed_nodes = names if len(names) == 1 else absent if len(absent) < len(names) else ()
    where = f" on {', '.join(failed_nodes[:_NAMES_MAX])}" if failed_nodes else ""
    message = f"the pods were not up within {limit:g} s{where}"
    return FailureCause("PodsReadyTimeout", message, failed_nodes, kind="start")


# Names in one message; a gang may have thousands.
_NAMES_MAX = 8


def progress_deadline_exceeded(cycle: CycleState, job: JobState) -> FailureCause | None:
    """The exceeded progress deadline, unless most jobs' streams are lost together with this one."""
    assignment, deadline = job.status.assignment, job.spec.progress_deadline
    assert assignment is not None, f"{job.key}: active without nodes"
    if deadline is None or assignment.running_at is None:
        return None
    alive_at = max(job.observed.activity_at, assignment.running_at)
    lost_at = job.observed.stream_lost_at
    if lost_at is None:
        if not cycle.passed(alive_at + deadline.seconds):
            return None
        return FailureCause(
            "ProgressDeadlineExceeded",
            f"neither progress nor a log line for {deadline}",
            kind="run",
        )
    # The job has no stream. If many jobs have none, the report path is broken and missing reports
    # mean nothing. Otherwise its own sidecars get a second progress deadline to reconnect.
    if many_disconnected(cycle) or not cycle.passed(max(alive_at, lost_at) + 2 * deadline.seconds):
        return None
    return FailureCause(
        "ProgressDeadlineExceeded",
        f"its sidecars have had no stream for more than {deadline}, those of other jobs have",
        kind="run",
        counted=False,
    )


def many_disconnected(cycle: CycleState) -> bool:
    """Whether most running jobs have no stream: the report path is broken, not the jobs."""
    running = [job for job in cycle.active_jobs().values() if job.status.phase is Phase.RUNNING]
    disconnected = sum(job.observed.stream_lost_at is not None for job in running)
    return disconnected >= cycle.settings.outage_jobs_min and 2 * disconnected >= len(running)


def assess(cycle: CycleState, cause: FailureCause) -> tuple[bool, str]:
    """Whether the restart counts against the job, and the message to store."""
    outage = circuit_breaker.outage(cycle, cause.kind) if cause.kind is not None else ""
    if outage:
        return False, f"{cause.message}; {outage}"
    return cause.counted, cause.message


def record_failures(cycle: CycleState) -> None:
    """Record all failures of this step before any is assessed: many jobs may fail together."""
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


def _is_its_own(exited: Exit) -> bool:
    """Whether the job itself causes the signal: it crashes, or uses too much memory."""
    crashed = exited.signal not in _FROM_OUTSIDE
    return crashed or (exited.signal == signal.SIGKILL and "oom" in exited.reason.lower())


def _describe(exited: Exit) -> str:
    detail = f" ({exited.reason})" if exited.reason else ""
    if exited.outcome == "Killed":
        how = f"was killed by signal {exited.signal}" if exited.signal else "disappeared"
        return f"the pod on node {exited.node} {how}{detail}"
    return f"a rank on node {exited.node} exited with status {exited.exit_status}{detail}"


def _loss(cycle: CycleState, name: str) -> str:
    state = cycle.nodes.get(name)
    return (state.node.reason or state.lost) if state else "unknown node"


def _fault(cycle: CycleState, name: str) -> str:
    """The hardware fault that the node has, or had recently."""
    state = cycle.nodes.get(name)
    if state is None or not state.fault:
        return ""
    recent = cycle.now - state.fault_at <= cycle.settings.hardware_fault_seconds
    return state.fault if state.node.fault or recent else ""


__all__ = [
    "FailureCause",
    "assess",
    "infrastructure",
    "many_disconnected",
    "progress_deadline_exceeded",
    "record_failures",
    "start_overdue",
]

"""Actions: what drivers have to do after a step, in the order of the list.

Commits come first: a driver that cannot store one, because of another writer, skips the following
actions and rebuilds. Every action is idempotent, and after a rebuild the engine repeats every
action that is still due.
"""

# ruff: noqa: TC001 - the decision log resolves the annotations

from __future__ import annotations

from dataclasses import dataclass, field

from flyer.api import Assignment, Checkpoint, FlyerJobStatus


@dataclass(frozen=True, slots=True)
class _ForObject:
    """`uid`: of the object with the key `job`. An object created later with its name is another."""

    uid: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class Commit(_ForObject):
    """Store this status on the job, in one compare-and-swap. In the order given."""

    job: str
    status: FlyerJobStatus


@dataclass(frozen=True, slots=True)
class ReleaseToken:
    """The job no longer crosses zones."""

    job: str


@dataclass(frozen=True, slots=True)
class HoldToken:
    """The job holds the cross-zone token until ReleaseToken. Precedes its Start."""

    job: str


@dataclass(frozen=True, slots=True)
class Signal(_ForObject):
    """Request that the job saves and releases its nodes before `deadline`.

    Sets the suspend code 1 in the job's socket (and sends SIGTERM to ranks that never opened it).
    Repeated with a later deadline when the grace period is extended.
    """

    job: str
    attempt: int
    deadline: float
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Stop(_ForObject):
    """Stop the pods of this attempt on these nodes, and report NodeEmptied for each node.

    `kill`: at once. Without it: SIGTERM first, and SIGKILL after the driver's own short pause.
    Repeated every `SchedulerSettings.stop_retry_seconds` until the nodes are empty. For a node
    without pods of this attempt the driver reports NodeEmptied at once.
    """

    job: str
    attempt: int
    nodes: tuple[str, ...]
    kill: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Start(_ForObject):
    """Start one pod per node, in this order of ranks, and report GangStarted or PodExited.

    The nodes are empty and healthy. `restore_from` is the newest durable checkpoint.
    """

    job: str
    attempt: int
    assignment: Assignment
    restore_from: Checkpoint | None
    user_state: int


@dataclass(frozen=True, slots=True)
class Finish(_ForObject):
    """The job has ended and its nodes are empty: close its socket and finish its logs."""

    job: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Step again, for example with a Tick, at this time at the latest. Always the last action."""

    time: float


Action = Commit | ReleaseToken | HoldToken | Signal | Stop | Start | Finish | WakeAt

__all__ = [
    "Action",
    "Commit",
    "Finish",
    "HoldToken",
    "ReleaseToken",
    "Signal",
    "Start",
    "Stop",
    "WakeAt",
]

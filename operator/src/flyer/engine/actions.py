"""What the engine tells drivers to do, in the order in which they must do it.

Commits come first: a driver that cannot store one (somebody else wrote) does nothing of what
follows, and rebuilds. Every action is idempotent, and after a rebuild the engine tells again
everything that is still to be done.
"""

# ruff: noqa: TC001 - the decision log resolves the annotations

from __future__ import annotations

from dataclasses import dataclass

from flyer.api import Assignment, Checkpoint, FlyerJobStatus


@dataclass(frozen=True, slots=True)
class Commit:
    """Store this status on the job, in one compare-and-swap. In the order given."""

    job: str
    status: FlyerJobStatus


@dataclass(frozen=True, slots=True)
class ReleaseToken:
    """The job no longer crosses zones."""

    job: str


@dataclass(frozen=True, slots=True)
class HoldToken:
    """The job is the one that may cross zones, until ReleaseToken. Comes before its Start."""

    job: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Ask the job to save and to give its nodes back before `deadline`.

    Sets the suspend code 1 in the job's socket (and sends SIGTERM to ranks that never opened it).
    Told again with a later deadline when the grace is extended.
    """

    job: str
    attempt: int
    deadline: float
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the pods of this attempt on these nodes, and tell NodeEmptied for each.

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
class Start:
    """Start one pod per assigned node, in this order of ranks, and tell GangStarted or PodExited.

    The nodes are empty, healthy and the job's. `restore_from` is the newest durable checkpoint.
    """

    job: str
    attempt: int
    assignment: Assignment
    restore_from: Checkpoint | None
    user_state: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The job has ended for good and its nodes are empty: close its socket, seal its logs."""

    job: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Step again (a Tick will do) at this time at the latest. The last action of a step, if any."""

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

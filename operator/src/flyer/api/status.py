"""FlyerJob's status: everything that the scheduler knows about a job, so that it can be forgotten.

The scheduler writes it whole, in one compare-and-swap, before it acts; a scheduler that starts
reads it and continues. A node is *reserved* for the job whose `assignment` names it (while the
phase is Reserved, Draining, Starting, Running or Suspending) and *occupied* by the job whose
`occupied` names it: processes of that job may still exist there, whatever its phase.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Literal

from pydantic import Field

from flyer.api.base import Model
from flyer.api.timestamps import Timestamp


class Phase(StrEnum):
    """A summary of where the job is; conditions say why."""

    QUEUED = "Queued"
    RESERVED = "Reserved"  # has its nodes, all empty; starts in the same step
    DRAINING = "Draining"  # has its nodes; those who were there are leaving
    STARTING = "Starting"
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"  # by spec.suspend; a preempted job is Queued again
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class SuspendCode(IntEnum):
    """How far a suspension is; it only grows within an attempt."""

    NONE = 0
    SENT = 1
    RECEIVED = 2
    MAY_SUSPEND = 3  # the job has saved and gives its nodes back


class AssignedNode(Model):
    """One node of a gang; the order of nodes is the order of ranks."""

    name: str
    zone: str
    first_rank: int = Field(ge=0)


class Assignment(Model):
    """The nodes that an attempt runs on, contiguous by zone."""

    epoch: int = Field(ge=0, description="Of the scheduler that decided it")
    nodes: tuple[AssignedNode, ...]
    bridge: tuple[str, ...] = Field(
        default=(), description="The one pair of nodes that talks across zones, if any"
    )
    same_split: bool | None = Field(
        default=None,
        description="Whether the nodes per zone, in order, are those of the attempt before: "
        "then sums are taken in the same order and results are the same bits",
    )
    reserved_at: Timestamp
    started_at: Timestamp | None = None
    running_at: Timestamp | None = None

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones in rank order, each once."""
        return tuple(dict.fromkeys(node.zone for node in self.nodes))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes in rank order."""
        return tuple(node.name for node in self.nodes)

    @property
    def split(self) -> tuple[int, ...]:
        """How many nodes in each zone, in rank order."""
        zones = [node.zone for node in self.nodes]
        return tuple(zones.count(zone) for zone in self.zones)


class Suspension(Model):
    """A suspension under way: who asked, why, and until when the job may save."""

    reason: str = Field(description="Preempted, Suspended, Stopped or DeadlineExceeded")
    by: str = Field(description="The user or the job that asked")
    message: str = ""
    since: Timestamp
    deadline: Timestamp = Field(description="Killed then; progress moves it")
    limit: Timestamp = Field(description="The deadline never moves past this")
    expired: bool = Field(default=False, description="Whether the deadline passed before a release")


class PreviousNode(Model):
    """A node of the attempt before, at its place in rank order."""

    name: str
    zone: str


class Chain(Model):
    """What all attempts of one job share."""

    id: str = ""
    attempt: int = Field(default=0, ge=0, description="0: never had nodes")
    restarts: int = Field(default=0, ge=0, description="After failures of the infrastructure")
    life_state: int = Field(default=0, ge=0, le=2**32 - 1, description="The user's own word")
    submitted_at: Timestamp | None = Field(default=None, description="Its place in the queue")
    queued_at: Timestamp | None = Field(default=None, description="Waiting since")
    not_before: Timestamp | None = Field(default=None, description="Pause after repeated failures")
    fruitless_restarts: int = Field(
        default=0, ge=0, description="Consecutive ones without a newer durable checkpoint"
    )
    restored_step: int | None = Field(
        default=None, description="Step of the durable checkpoint at the latest restart"
    )
    previous: tuple[PreviousNode, ...] = Field(
        default=(), description="Nodes, in rank order, of the attempt that the checkpoint is of"
    )
    avoid: tuple[str, ...] = Field(
        default=(), description="Nodes that failed this job, avoided where others are free"
    )


class OccupiedNode(Model):
    """A node on which processes of this job may still exist."""

    name: str
    zone: str
    attempt: int


class Exit(Model):
    """How the pod of one node ended, in the current attempt."""

    node: str
    outcome: Literal["Succeeded", "Failed", "Killed"]
    exit_status: int | None = None
    signal: int | None = None
    reason: str = ""
    time: Timestamp


class Eviction(Model):
    """The latest time that the job lost its nodes without having ended."""

    reason: str
    by: str = ""
    message: str = ""
    time: Timestamp
    attempt: int
    suspend_code: SuspendCode = SuspendCode.NONE
    lost_steps: int | None = Field(
        default=None, description="Steps reported after the last durable checkpoint"
    )


class Checkpoint(Model):
    """The newest durable checkpoint: what a restart begins with."""

    step: int
    time: Timestamp
    path: str
    durable: bool = True


class Progress(Model):
    """The latest progress that the job reported; written at intervals."""

    step: int
    time: Timestamp


class Pending(Model):
    """Why the job has no nodes."""

    verdict: Literal["Pending", "Never"] = "Pending"
    reason: str
    message: str
    eta: Timestamp | None = None
    blocked_by: tuple[str, ...] = ()


class Condition(Model):
    """One fact about the job, in the sense and the words of Kueue and Trainer."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: Timestamp
    observed_generation: int | None = None


class FlyerJobStatus(Model):
    """See the module's description."""

    phase: Phase = Phase.QUEUED
    reason: str = ""
    message: str = ""
    suspend_code: SuspendCode = SuspendCode.NONE
    zones: str = Field(default="", description="Such as A or A+B")
    assignment: Assignment | None = None
    suspension: Suspension | None = None
    chain: Chain = Chain()
    occupied: tuple[OccupiedNode, ...] = ()
    exits: tuple[Exit, ...] = ()
    eviction: Eviction | None = None
    progress: Progress | None = None
    checkpoint: Checkpoint | None = None
    pending: Pending | None = None
    conditions: tuple[Condition, ...] = ()
    observed_generation: int | None = None

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if it has been set."""
        return next((one for one in self.conditions if one.type == kind), None)


__all__ = [
    "AssignedNode",
    "Assignment",
    "Chain",
    "Checkpoint",
    "Condition",
    "Eviction",
    "Exit",
    "FlyerJobStatus",
    "OccupiedNode",
    "Pending",
    "Phase",
    "PreviousNode",
    "Progress",
    "SuspendCode",
    "Suspension",
]

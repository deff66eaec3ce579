"""FlyerJob's status: everything that the scheduler knows about a job, so that it can be forgotten.

The scheduler writes it whole, in one compare-and-swap, before it acts; a scheduler that starts
reads it and continues. A node is *reserved* for the job whose `assignment` names it (while the
phase is Reserved, Draining, Starting, Running or Suspending) and *occupied* by the job whose
`occupied` names it: processes of that job may still exist there, whatever its phase.

Every commit carries the fencing epoch of the leader that made it in `epoch` (the Lease's
`leaseTransitions` + 1; one machine's driver counts its starts). It is written with a change, and
once a term into one job to mark where the term begins: the API server refuses a lower one, so a
leader that lost its lease cannot undo what the next one decided. `assignment.epoch` stays what it
was when the nodes were given.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from flyer.api.base import Model
from flyer.api.conditions import MESSAGE_CHARS_MAX, Condition, Conditions
from flyer.api.lifecycle import EPOCH_RULE, HISTORY_RULES, STATUS_RULES
from flyer.api.phases import Phase, SuspendCode
from flyer.api.priorities import Priority
from flyer.api.rules import Rule, atomic_map, rules, says
from flyer.api.timestamps import Timestamp
from flyer.job.limits import PATH_CHARS_MAX, REASON_CHARS_MAX, TRACEBACK_CHARS_MAX

# Kubernetes supports so many nodes in a cluster; with all of them one gang's status stays within
# what the store takes for an object.
NODES_MAX = 5_000
_NAME_CHARS_MAX = 253
_ZONE_CHARS_MAX = 63
PAST_ATTEMPTS_MAX = 5
# Preemptions of which the times are kept: more than the scheduler's budget counts.
PREEMPTIONS_MAX = 8
# What a status lists of why a job waits: a queue of thousands of jobs stays small in the store.
PENDING_REASONS_MAX = 8
PENDING_CHARS_MAX = 512
UNBLOCK_MAX = 4
PAST_ATTEMPT_NODES_MAX = 8
# Who asked: a user or a job. Longer names, as of service accounts, are cut.
BY_CHARS_MAX = 253


class AssignedNode(Model):
    """One node of a gang; the order of nodes is the order of ranks."""

    name: str = Field(max_length=_NAME_CHARS_MAX, description="The node")
    zone: str = Field(max_length=_ZONE_CHARS_MAX, description="Its network zone")
    first_rank: int = Field(ge=0, description="The lowest rank that runs there")


class Assignment(Model):
    """The nodes that an attempt runs on, contiguous by zone."""

    epoch: int = Field(ge=0, description="Of the scheduler that decided it")
    nodes: tuple[AssignedNode, ...] = Field(
        min_length=1, max_length=NODES_MAX, description="In rank order, contiguous by zone"
    )
    node_class: str = Field(
        default="", max_length=_NAME_CHARS_MAX, description="Node class of all nodes of the gang."
    )
    cross_zone_pair: tuple[str, ...] = Field(
        default=(),
        max_length=2,
        description="The one pair of nodes that talks across zones, if any",
        json_schema_extra={"items": {"type": "string", "maxLength": _NAME_CHARS_MAX}},
    )
    same_zone_layout: bool | None = Field(
        default=None,
        description="Whether the nodes per zone, in order, are those of the attempt before: "
        "then sums are taken in the same order and results are the same bits",
    )
    backfill: bool = Field(
        default=False,
        description="Whether the job started ahead of its turn, on nodes that a job ahead of it "
        "waits for: that one may have them back once this one has run for its minRuntime",
    )
    reserved_at: Timestamp = Field(description="When the job got the nodes")
    started_at: Timestamp | None = Field(
        default=None, description="When all of them were empty and the pods were ordered"
    )
    running_at: Timestamp | None = Field(default=None, description="When all pods were up")
    restored_step: int | None = Field(
        default=None, description="The step of the checkpoint that the attempt started from"
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.crossZonePair) || size(self.crossZonePair) in [0, 2]",
                "status.assignment.crossZonePair: is one pair of nodes or none: write both or "
                "neither",
                says(
                    "status.assignment.crossZonePair: has %d nodes: a gang crosses zones over one "
                    "pair, write two names or none",
                    "size(self.crossZonePair)",
                ),
                ".crossZonePair",
            ),
        )
    )

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

    reason: str = Field(
        max_length=128,
        description="Preempted, Suspended, Requeued, NodeDrained, Yielded, Stopped or "
        "DeadlineExceeded",
    )
    by: str = Field(max_length=BY_CHARS_MAX, description="The user or the job that asked")
    message: str = Field(default="", max_length=MESSAGE_CHARS_MAX, description="For people")
    since: Timestamp = Field(description="When the job was asked")
    deadline: Timestamp = Field(description="Killed then; progress moves it")
    limit: Timestamp = Field(description="The deadline never moves past this")
    expired: bool = Field(default=False, description="Whether the deadline passed before a release")


class PreviousNode(Model):
    """A node of the attempt before, at its place in rank order."""

    name: str = Field(max_length=_NAME_CHARS_MAX, description="The node")
    zone: str = Field(max_length=_ZONE_CHARS_MAX, description="Its network zone")


class JobHistory(Model):
    """What all attempts of one job share."""

    id: str = Field(default="", max_length=_NAME_CHARS_MAX, description="The first attempt's uid")
    attempt: int = Field(default=0, ge=0, description="0: never had nodes")
    restarts: int = Field(default=0, ge=0, description="After failures of the infrastructure")
    user_state: int = Field(default=0, ge=0, le=2**32 - 1, description="The user's own word")
    submitted_at: Timestamp | None = Field(default=None, description="Its place in the queue")
    queued_at: Timestamp | None = Field(default=None, description="Waiting since")
    turn_at: Timestamp | None = Field(
        default=None,
        description="Its place among jobs of its priority since its time slice was over; absent: "
        "submittedAt",
    )
    slice_used: float = Field(
        default=0.0, ge=0, description="Seconds that earlier attempts used of its time slice"
    )
    preempted_at: tuple[Timestamp, ...] = Field(
        default=(),
        max_length=PREEMPTIONS_MAX,
        description="When jobs of other users preempted it before its time slice was over, the "
        "oldest first. Only the last day counts",
    )
    not_before: Timestamp | None = Field(
        default=None, description="Pause after repeated failures, or since its pods were refused"
    )
    refusals: int = Field(
        default=0, ge=0, description="Attempts in a row whose pods the API server refused"
    )
    restarts_without_progress: int = Field(
        default=0, ge=0, description="Consecutive ones without a newer durable checkpoint"
    )
    unblamed_restarts: int = Field(
        default=0,
        ge=0,
        description="Consecutive restarts without a newer durable checkpoint that do not count "
        "against maxRestarts: a hardware fault, or a failure that many jobs had at once",
    )
    signal: int | None = Field(
        default=None, description="The signal that ended the latest attempt that restarted"
    )
    same_signal: int = Field(
        default=0,
        ge=0,
        description="Attempts in a row that this signal ended without a newer durable checkpoint",
    )
    restored_step: int | None = Field(
        default=None, description="Step of the durable checkpoint at the latest restart"
    )
    previous: tuple[PreviousNode, ...] = Field(
        default=(),
        max_length=NODES_MAX,
        description="Nodes, in rank order, of the attempt that the checkpoint is of",
    )
    avoid: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="Nodes that failed this job, avoided where others are free",
        json_schema_extra={"items": {"type": "string", "maxLength": _NAME_CHARS_MAX}},
    )

    model_config = ConfigDict(json_schema_extra=rules(*HISTORY_RULES))


class OccupiedNode(Model):
    """A node on which processes of this job may still exist."""

    name: str = Field(max_length=_NAME_CHARS_MAX, description="The node")
    zone: str = Field(max_length=_ZONE_CHARS_MAX, description="Its network zone")
    attempt: int = Field(ge=0, description="Whose processes")


class Exit(Model):
    """How the pod of one node ended, in the current attempt."""

    node: str = Field(max_length=_NAME_CHARS_MAX, description="Which node's pod")
    outcome: Literal["Succeeded", "Failed", "Killed"] = Field(
        description="Failed: by its own code; Killed: by a signal, or it vanished"
    )
    exit_status: int | None = Field(default=None, description="Of the first rank that failed")
    signal: int | None = Field(default=None, description="That ended it; 0: it vanished")
    reason: str = Field(
        default="",
        max_length=REASON_CHARS_MAX,
        description="The last line of its traceback; of the first 64 exits",
    )
    rank: int | None = Field(default=None, description="The rank that failed, where it is known")
    traceback: str | None = Field(
        default=None,
        max_length=TRACEBACK_CHARS_MAX,
        description="The end of its traceback; of the first exit that has one",
    )
    time: Timestamp = Field(description="When it was seen")


class Eviction(Model):
    """The latest time that the job lost its nodes without having ended."""

    reason: str = Field(max_length=128, description="Why, as one CamelCase word")
    by: str = Field(
        default="", max_length=BY_CHARS_MAX, description="The user or the job that asked"
    )
    message: str = Field(default="", max_length=MESSAGE_CHARS_MAX, description="For people")
    time: Timestamp = Field(description="When it had left")
    attempt: int = Field(ge=0, description="Which attempt ended so")
    suspend_code: SuspendCode = Field(
        default=SuspendCode.NONE, description="How far it had answered"
    )
    lost_steps: int | None = Field(
        default=None,
        description="Steps reported after the last durable checkpoint, 0 if the job said that it "
        "had saved",
    )


class PastAttempt(Model):
    """An attempt that lost its nodes without having ended the job."""

    attempt: int = Field(ge=0, description="Its number")
    started_at: Timestamp = Field(description="When its pods were ordered")
    ended_at: Timestamp = Field(description="When it had left its nodes")
    reason: str = Field(max_length=128, description="Why, as one CamelCase word")
    node_count: int = Field(ge=0, description="On how many nodes it ran")
    nodes: tuple[PreviousNode, ...] = Field(
        default=(),
        max_length=PAST_ATTEMPT_NODES_MAX,
        description="The first of them, in rank order",
    )
    restored_step: int | None = Field(
        default=None, description="The step of the checkpoint that it started from"
    )
    same_zone_layout: bool | None = Field(
        default=None, description="As in status.assignment, which it was"
    )
    lost_steps: int | None = Field(
        default=None,
        description="Steps reported after the last durable checkpoint, 0 if the job said that it "
        "had saved. Absent: nothing was reported",
    )


class Checkpoint(Model):
    """The newest durable checkpoint: what a restart begins with."""

    step: int = Field(description="The training step that it holds")
    time: Timestamp = Field(description="When it was durable")
    path: str = Field(max_length=PATH_CHARS_MAX, description="Where it is")
    durable: bool = Field(default=True, description="Only such ones are written here")


class Progress(Model):
    """The latest progress that the job reported; written at intervals."""

    step: int = Field(description="The last step that was completed")
    time: Timestamp = Field(description="When it was reported")


class PendingReason(Model):
    """One thing that keeps the job from its nodes."""

    reason: str = Field(max_length=128, description="As one CamelCase word")
    message: str = Field(max_length=PENDING_CHARS_MAX, description="With names and numbers")
    job: str = Field(
        default="",
        max_length=2 * _NAME_CHARS_MAX,
        description="The job in the way as namespace/name, if it is of the same namespace",
    )
    user: str = Field(default="", max_length=BY_CHARS_MAX, description="Whose job that is")
    node: str = Field(default="", max_length=_NAME_CHARS_MAX, description="The node that is out")
    since: Timestamp | None = Field(default=None, description="Since when it is so")
    until: Timestamp | None = Field(
        default=None, description="When it ends by itself, if that is known"
    )


class Unblock(Model):
    """One way to let the job start."""

    command: str = Field(max_length=PENDING_CHARS_MAX, description="A command for a person")
    effect: str = Field(max_length=PENDING_CHARS_MAX, description="The effect of the command")
    node: str = Field(
        default="", max_length=_NAME_CHARS_MAX, description="The node that it brings back, if any"
    )


class Pending(Model):
    """Why the job has no nodes, as the scheduler that leads decided it."""

    verdict: Literal["Pending", "Never"] = Field(
        default="Pending", description="Never: not in this cluster, not with these quotas"
    )
    reason: str = Field(max_length=128, description="The deciding reason, as one CamelCase word")
    message: str = Field(
        max_length=MESSAGE_CHARS_MAX, description="Every reason, with names and numbers"
    )
    eta: Timestamp | None = Field(default=None, description="When it starts, if that is known")
    blocked_by: tuple[str, ...] = Field(
        default=(),
        max_length=NODES_MAX,
        description="The first jobs in its way, as namespace/name, of the same namespace",
        json_schema_extra={"items": {"type": "string", "maxLength": 2 * _NAME_CHARS_MAX}},
    )
    position: int | None = Field(
        default=None, ge=1, description="Its place among the waiting jobs when this was written"
    )
    reasons: tuple[PendingReason, ...] = Field(
        default=(),
        max_length=PENDING_REASONS_MAX,
        description="Every reason, the deciding one first; beyond the limit they are counted",
    )
    more: int = Field(default=0, ge=0, description="The number of reasons that are not listed")
    unblock: tuple[Unblock, ...] = Field(
        default=(),
        max_length=UNBLOCK_MAX,
        description="What would let the job start, the least lost work first",
    )
    time: Timestamp | None = Field(
        default=None,
        description="When the scheduler wrote this. A changed reason is written at once, changed "
        "numbers after 30 seconds at the front of the queue and more slowly behind it",
    )


class FlyerJobStatus(Model):
    """Everything that the scheduler knows about the job; written by it alone."""

    epoch: int = Field(
        default=0,
        ge=0,
        description="The fencing epoch of the leader that wrote this",
        json_schema_extra=rules(EPOCH_RULE),
    )
    phase: Phase = Field(
        default=Phase.QUEUED, description="A summary of where the job is; conditions say why"
    )
    reason: str = Field(default="", max_length=128, description="Why, as one CamelCase word")
    message: str = Field(
        default="", max_length=MESSAGE_CHARS_MAX, description="Why, with names and numbers"
    )
    suspend_code: SuspendCode = Field(
        default=SuspendCode.NONE,
        description="How far a suspension is: 0 none, 1 sent, 2 received, 3 may suspend (the job "
        "has saved and gives its nodes back); only grows within an attempt",
    )
    priority: Priority | None = Field(
        default=None,
        description="The level that the job holds its nodes at: of spec.priority if its quota "
        "has room there, and what auto came to",
    )
    zones: str = Field(default="", max_length=160, description="Such as A or A+B")
    assignment: Assignment | None = Field(
        default=None, description="The nodes that the job has, in rank order; committed before use"
    )
    suspension: Suspension | None = Field(
        default=None, description="A suspension under way: who asked, why, and until when"
    )
    history: JobHistory = Field(
        default=JobHistory(), description="What all attempts of the job share"
    )
    occupied: tuple[OccupiedNode, ...] = Field(
        default=(),
        max_length=2 * NODES_MAX,
        description="Nodes on which processes of the job may still exist, whatever its phase",
    )
    exits: tuple[Exit, ...] = Field(
        default=(), max_length=NODES_MAX, description="How the pods of this attempt ended"
    )
    eviction: Eviction | None = Field(
        default=None, description="The latest time that it lost its nodes without having ended"
    )
    past_attempts: tuple[PastAttempt, ...] = Field(
        default=(),
        max_length=PAST_ATTEMPTS_MAX,
        description="The latest attempts that lost their nodes, the oldest first",
    )
    progress: Progress | None = Field(
        default=None, description="The latest progress that it reported; written at intervals"
    )
    checkpoint: Checkpoint | None = Field(
        default=None, description="The newest durable checkpoint: what a restart begins with"
    )
    pending: Pending | None = Field(default=None, description="Why it has no nodes")
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status is about"
    )

    # One writer, and whole.
    model_config = ConfigDict(json_schema_extra={**rules(*STATUS_RULES), **atomic_map()})

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if it has been set."""
        return next((one for one in self.conditions if one.type == kind), None)


__all__ = [
    "AssignedNode",
    "Assignment",
    "Checkpoint",
    "Condition",
    "Eviction",
    "Exit",
    "FlyerJobStatus",
    "JobHistory",
    "OccupiedNode",
    "Pending",
    "PendingReason",
    "Phase",
    "PreviousNode",
    "Progress",
    "SuspendCode",
    "Suspension",
    "Unblock",
]

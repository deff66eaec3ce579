"""Attempts of a FlyerJob: their shared history, their ends, and the checkpoint of a restart."""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from flyer.api.base import Model
from flyer.api.conditions import MESSAGE_CHARS_MAX
from flyer.api.lifecycle import HISTORY_RULES
from flyer.api.limits import (
    BY_CHARS_MAX,
    NAME_CHARS_MAX,
    NODES_MAX,
    PAST_ATTEMPT_NODES_MAX,
    PREEMPTIONS_MAX,
    ZONE_CHARS_MAX,
)
from flyer.api.phases import SuspendCode
from flyer.api.rules import rules
from flyer.api.timestamps import Timestamp
from flyer.job.limits import PATH_CHARS_MAX, REASON_CHARS_MAX, TRACEBACK_CHARS_MAX


class PreviousNode(Model):
    """A node of a previous attempt. Nodes are listed in rank order."""

    name: str = Field(max_length=NAME_CHARS_MAX, description="Name of the node.")
    zone: str = Field(max_length=ZONE_CHARS_MAX, description="Network zone of the node.")


class JobHistory(Model):
    """What all attempts of one job share."""

    id: str = Field(
        default="",
        max_length=NAME_CHARS_MAX,
        description="Identifier of the history: the UID of the object when it was created. It "
        "never changes.",
    )
    attempt: int = Field(
        default=0,
        ge=0,
        description="Number of the current or latest attempt. 0 if the job never had nodes.",
    )
    restarts: int = Field(
        default=0, ge=0, description="Total number of restarts after failures. It only grows."
    )
    user_state: int = Field(
        default=0,
        ge=0,
        le=2**32 - 1,
        description="User-defined 32-bit state, preserved across attempts. Default: 0.",
    )
    submitted_at: Timestamp | None = Field(
        default=None,
        description="Time of submission. It determines the position in the queue among jobs of the "
        "same priority, also after a preemption.",
    )
    queued_at: Timestamp | None = Field(
        default=None, description="Time since which the job has been waiting for nodes."
    )
    turn_at: Timestamp | None = Field(
        default=None,
        description="Time at which the latest time slice ended. It replaces submittedAt for the "
        "position in the queue. Absent if no time slice has ended.",
    )
    slice_used: float = Field(
        default=0.0,
        ge=0,
        description="Seconds of the current time slice that earlier attempts have used.",
    )
    preempted_at: tuple[Timestamp, ...] = Field(
        default=(),
        max_length=PREEMPTIONS_MAX,
        description="Times at which jobs of other users preempted the job before the end of its "
        f"time slice, the oldest first. At most {PREEMPTIONS_MAX} are kept.",
    )
    not_before: Timestamp | None = Field(
        default=None,
        description="Earliest time of the next attempt, after repeated failures or refused pods. "
        "Absent if the job does not have to wait.",
    )
    refusals: int = Field(
        default=0,
        ge=0,
        description="Number of consecutive attempts whose pods the API server refused.",
    )
    restarts_without_progress: int = Field(
        default=0,
        ge=0,
        description="Number of consecutive restarts without a newer durable checkpoint. "
        "spec.maxRestarts limits it.",
    )
    unblamed_restarts: int = Field(
        default=0,
        ge=0,
        description="Number of consecutive restarts without a newer durable checkpoint that do not "
        "count against spec.maxRestarts: hardware faults, and simultaneous failures of many jobs. "
        "An attempt that ran for ten minutes resets it.",
    )
    signal: int | None = Field(
        default=None, description="Signal that ended the latest attempt that was restarted."
    )
    same_signal: int = Field(
        default=0,
        ge=0,
        description="Number of consecutive attempts that this signal ended without a newer durable "
        "checkpoint.",
    )
    restored_step: int | None = Field(
        default=None,
        description="Step of the durable checkpoint at the time of the latest restart.",
    )
    previous: tuple[PreviousNode, ...] = Field(
        default=(),
        max_length=NODES_MAX,
        description="Nodes of the attempt that wrote the checkpoint, in the order of ranks.",
    )
    avoid: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="Nodes on which the job failed. They are used only if no other nodes are "
        "available.",
        json_schema_extra={"items": {"type": "string", "maxLength": NAME_CHARS_MAX}},
    )

    model_config = ConfigDict(json_schema_extra=rules(*HISTORY_RULES))


class Exit(Model):
    """How the pod of one node ended, in the current attempt."""

    node: str = Field(
        max_length=NAME_CHARS_MAX, description="Name of the node on which the pod ran."
    )
    outcome: Literal["Succeeded", "Failed", "Killed"] = Field(
        description="Outcome of the pod. Succeeded: all ranks exited with status 0. Failed: a rank "
        "exited with another status. Killed: a signal ended the pod, or it disappeared."
    )
    exit_status: int | None = Field(
        default=None, description="Exit status of the first rank that failed."
    )
    signal: int | None = Field(
        default=None, description="Signal that terminated the pod. 0 if the pod disappeared."
    )
    reason: str = Field(
        default="",
        max_length=REASON_CHARS_MAX,
        description="Last line of the traceback. Recorded for the first 64 exits.",
    )
    rank: int | None = Field(default=None, description="Rank that failed, if it is known.")
    traceback: str | None = Field(
        default=None,
        max_length=TRACEBACK_CHARS_MAX,
        description="End of the traceback. Recorded for the first exit that has one.",
    )
    time: Timestamp = Field(description="Time at which the exit was observed.")


class Eviction(Model):
    """The latest time that the job lost its nodes without having ended."""

    reason: str = Field(
        max_length=128, description="Reason of the eviction as one word in CamelCase."
    )
    by: str = Field(
        default="",
        max_length=BY_CHARS_MAX,
        description="The user or the job that requested the eviction, if any.",
    )
    message: str = Field(
        default="",
        max_length=MESSAGE_CHARS_MAX,
        description="Human-readable details of the eviction.",
    )
    time: Timestamp = Field(description="Time at which the job had released its nodes.")
    attempt: int = Field(ge=0, description="Number of the attempt that was evicted.")
    suspend_code: SuspendCode = Field(
        default=SuspendCode.NONE, description="Suspend code of the attempt when it ended."
    )
    lost_steps: int | None = Field(
        default=None,
        description="Number of steps reported after the last durable checkpoint. 0 if the job "
        "reported a checkpoint before it released its nodes. Absent if no step was reported.",
    )


class PastAttempt(Model):
    """An attempt that lost its nodes without having ended the job."""

    attempt: int = Field(ge=0, description="Number of the past attempt.")
    started_at: Timestamp = Field(description="Time at which its pods were created.")
    ended_at: Timestamp = Field(description="Time at which it had released its nodes.")
    reason: str = Field(
        max_length=128, description="Reason of the eviction as one word in CamelCase."
    )
    node_count: int = Field(ge=0, description="Number of nodes that it ran on.")
    nodes: tuple[PreviousNode, ...] = Field(
        default=(),
        max_length=PAST_ATTEMPT_NODES_MAX,
        description=f"The first {PAST_ATTEMPT_NODES_MAX} of its nodes, in the order of ranks.",
    )
    restored_step: int | None = Field(
        default=None,
        description="Step of the checkpoint that the attempt started from. Absent without one.",
    )
    same_zone_layout: bool | None = Field(
        default=None,
        description="Value of status.assignment.sameZoneLayout in the past attempt.",
    )
    lost_steps: int | None = Field(
        default=None,
        description="Number of steps reported after the last durable checkpoint. 0 if the job "
        "reported a checkpoint before it released its nodes. Absent if no step was reported.",
    )


class Checkpoint(Model):
    """The newest durable checkpoint, from which a restart continues."""

    step: int = Field(description="Training step of the checkpoint.")
    time: Timestamp = Field(description="Time at which the checkpoint was durable.")
    path: str = Field(max_length=PATH_CHARS_MAX, description="Path of the checkpoint.")
    durable: bool = Field(
        default=True,
        description="Whether the checkpoint is durable. Only durable checkpoints are recorded.",
    )


class Progress(Model):
    """The latest progress that the job reported; written at intervals."""

    step: int = Field(description="Number of the last completed step.")
    time: Timestamp = Field(description="Time at which the step was reported.")
    exposed_percent: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Share of the step's time for which the job waited for communication, in "
        "percent. Absent if the job does not report it.",
    )


__all__ = [
    "Checkpoint",
    "Eviction",
    "Exit",
    "JobHistory",
    "PastAttempt",
    "PreviousNode",
    "Progress",
]

"""FlyerJob v1alpha1: specification of a training job."""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from flyer.api.base import StrictModel
from flyer.api.durations import AboveZero, Duration
from flyer.api.lifecycle import WAIT
from flyer.api.limits import NODES_MAX
from flyer.api.metadata import LABEL, LABEL_VALUE, ObjectMeta
from flyer.api.names import (
    API_VERSION,
    CHANGED_BY_ANNOTATION,
    KIND_JOB,
    MANAGER,
    QUEUE_LABEL,
    REASON_ANNOTATION,
    REQUEUE_ANNOTATION,
    USER_ANNOTATION,
)
from flyer.api.podtemplate import PodTemplate
from flyer.api.priorities import Priority
from flyer.api.rules import Rule, atomic_map, message_expression, rules
from flyer.api.status import FlyerJobStatus
from flyer.job.limits import PATH_CHARS_MAX

# Pod names are NAME-ATTEMPT-RANK and a host name has at most 63 characters: this leaves room for a
# million attempts.
NAME_CHARS_MAX = 51
# Kubernetes does not limit user names; the longest name of a service account has 339 characters.
USER_CHARS_MAX = 512
# For CEL: the phases in which a job has no nodes.
WAITING = "[" + ", ".join(f"'{phase.value}'" for phase in WAIT) + "]"
DEFAULT_QUEUE = "default"
# A domain, a slash, a path, as in batch/v1.
_MANAGER = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._~A-Za-z0-9/]+$"

SERVICE_ACCOUNT_PREFIX = "system:serviceaccount:"


class CrossZone(StrEnum):
    """Whether the gang may span two zones."""

    NEVER = "Never"
    LAST_RESORT = "LastResort"


class StopMode(StrEnum):
    """How a job is stopped permanently."""

    GRACEFUL = "Graceful"
    NOW = "Now"


class Preemption(StrictModel):
    """How a running job is interrupted."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "duration(self.maxCheckpointGracePeriod) >= duration(self.checkpointGracePeriod)",
                "spec.preemption.maxCheckpointGracePeriod: is shorter than checkpointGracePeriod: "
                "set it to checkpointGracePeriod or more",
                message_expression(
                    "spec.preemption.maxCheckpointGracePeriod: %s is shorter than "
                    "checkpointGracePeriod %s: set maxCheckpointGracePeriod to %s or more",
                    "self.maxCheckpointGracePeriod",
                    "self.checkpointGracePeriod",
                    "self.checkpointGracePeriod",
                ),
                ".maxCheckpointGracePeriod",
            )
        )
    )

    checkpoint_grace_period: Duration = Field(
        default=Duration("60s"),
        description="Time to checkpoint after the suspend signal. Each progress report of a new "
        "step restarts it, up to maxCheckpointGracePeriod. Default: 60s.",
    )
    max_checkpoint_grace_period: Duration = Field(
        default=Duration("10m"),
        description="Upper limit of the checkpoint grace period, including all extensions by "
        "progress reports. Must not be shorter than checkpointGracePeriod. Default: 10m.",
    )
    min_runtime: Duration = Field(
        default=Duration("15m"),
        description="Minimum run time of an attempt before the job can be preempted. Default: 15m.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Preemption:
        shortest, longest = self.checkpoint_grace_period, self.max_checkpoint_grace_period
        if longest < shortest:
            raise ValueError(
                f"maxCheckpointGracePeriod {longest} is shorter than checkpointGracePeriod "
                f"{shortest}: set maxCheckpointGracePeriod to {shortest} or more"
            )
        return self


class CheckpointPolicy(StrictModel):
    """Where and how often the job saves checkpoints."""

    path: str = Field(
        min_length=1,
        max_length=PATH_CHARS_MAX,
        description="Directory of the checkpoints. Must be visible on all nodes.",
    )
    interval: Duration = Field(
        default=Duration("5m"),
        description="Intended time between two checkpoints. The scheduler compares it with the "
        "time since the last one when it chooses jobs to preempt. Default: 5m.",
    )


class Collectives(StrictModel):
    """Additions to the pods for collective communication."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.inject || !self.daemon",
                "spec.collectives.daemon: is part of what inject adds: set inject too, or neither",
                field=".daemon",
            )
        )
    )

    inject: bool = Field(
        default=True,
        description="Adds the hfreduce package and the topology file to the pods. Default: true.",
    )
    daemon: bool = Field(
        default=False,
        description="Runs HFReduce in one sidecar per node, hfreduced, instead of in the ranks. "
        "Requires inject. Default: false.",
    )

    @model_validator(mode="after")
    def _the_daemon_is_injected(self) -> Collectives:
        if self.daemon and not self.inject:
            raise ValueError("daemon: is part of what inject adds: set inject too, or neither")
        return self


class FlyerJobSpec(StrictModel):
    """Desired state of the job: its command, its number of nodes and how it may be interrupted."""

    # A new field: add it to one of the lists in `mutability`, and to `needs_of` in
    # `flyer.engine.placement.node_selection` if it decides which nodes the job may have.

    nodes: int = Field(
        ge=1,
        le=NODES_MAX,
        description="Number of whole nodes. The gang gets all of them or none. Immutable while the "
        f"job has nodes. Range: 1 to {NODES_MAX}.",
    )
    ranks_per_node: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of ranks on each node, usually one per GPU. Range: 1 to 1024. "
        "Default: 1.",
    )
    priority: Annotated[Priority, Field(strict=False)] = Field(
        default=Priority.NORMAL,
        description="Priority class of the job. A job of a higher class is scheduled first and may "
        "preempt jobs of lower classes. auto selects the highest class for which a FlyerQuota "
        "limit has room. The values are names of priority classes and therefore in lower case. "
        "May be changed at any time. Default: normal.",
    )
    queue: str | None = Field(
        default=None,
        pattern=LABEL,
        max_length=63,
        description="Queue of the job, for quotas and reports. Defaults to the label "
        f"{QUEUE_LABEL} of the job, otherwise to {DEFAULT_QUEUE}.",
    )
    node_class: str | None = Field(
        default=None,
        pattern=LABEL_VALUE,
        max_length=63,
        description="Node class of the gang: the value of the node label "
        "fireflyer.dev/node-class. If absent, the scheduler selects one class.",
    )
    zone: str | None = Field(
        default=None,
        pattern=LABEL_VALUE,
        max_length=63,
        description="Zone of the gang: the value of the node label fireflyer.dev/zone. If absent, "
        "the scheduler selects the zone.",
    )
    cross_zone: Annotated[CrossZone, Field(strict=False)] = Field(
        default=CrossZone.LAST_RESORT,
        description="Whether the gang may span two zones. Never: all nodes are in one zone. "
        "LastResort: two zones if no single zone has enough nodes and no other job crosses zones. "
        "Default: LastResort.",
    )
    suspend: bool = Field(
        default=False,
        description="Whether the job is suspended. true: the job saves a checkpoint and releases "
        "its nodes. false: it queues again at its previous position. Default: false.",
    )
    stop: Annotated[StopMode, Field(strict=False)] | None = Field(
        default=None,
        description="Stops the job permanently. Graceful: the job saves a checkpoint first. Now: "
        "the job is killed. The object, checkpoints and logs are kept; deleting the object stops "
        "the job immediately. A stop cannot be undone.",
    )
    active_deadline: (
        Annotated[Duration, AboveZero("spec.activeDeadline", "leave the field out")] | None
    ) = Field(
        default=None,
        description="Maximum run time of one attempt. The job saves a checkpoint and is stopped "
        "when it is exceeded. While the job has nodes the value can be lowered but not raised, "
        "because other jobs are planned by it. If absent, the run time is not limited.",
    )
    progress_deadline: (
        Annotated[Duration, AboveZero("spec.progressDeadline", "write null")] | None
    ) = Field(
        default=Duration("30m"),
        description="Maximum time without a progress report and without output. A job that exceeds "
        "it counts as hung and is restarted from its last durable checkpoint. null disables the "
        "check. Default: 30m.",
    )
    max_restarts: int = Field(
        default=10,
        ge=0,
        le=10_000,
        description="Maximum number of consecutive restarts without a newer durable checkpoint. "
        "The job fails when it is exceeded. Range: 0 to 10000. Default: 10.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="Seconds after which a finished job is deleted together with its pods and "
        "their logs, as in batch/v1 Job. If absent, FlyerTopology spec.finishedJobs decides.",
    )
    preemption: Preemption = Field(
        default=Preemption(), description="Limits on how and when the job may be preempted."
    )
    checkpoint: CheckpointPolicy | None = Field(
        default=None, description="Where and how often the job saves checkpoints."
    )
    collectives: Collectives = Field(
        default=Collectives(), description="Additions to the pods for collective communication."
    )
    managed_by: str | None = Field(
        default=None,
        pattern=_MANAGER,
        max_length=63,
        description="Controller that runs the job, as in batch/v1 Job. Jobs of other controllers "
        f"are ignored by this one. Immutable. Default: {MANAGER}.",
    )
    template: PodTemplate = Field(
        description="Pod template of one node. All nodes of the gang run the same template.",
        json_schema_extra=atomic_map(),
    )


JOB_RULES = (
    Rule(
        "self.spec.nodes == oldSelf.spec.nodes"
        f" || self.?status.?phase.orValue('{WAIT[0].value}') in {WAITING}",
        "spec.nodes: is fixed while the job has nodes: suspend it first, or create another job",
        message_expression(
            "spec.nodes: %d cannot replace what the job has while it is %s: suspend it first "
            "(spec.suspend: true) and change it once it is Suspended, or create another job",
            "self.spec.nodes",
            "self.status.phase",
        ),
        ".spec.nodes",
    ),
    Rule(
        # By fields, not by optionals: the API server cannot estimate the length of an optional's
        # value.
        "has(self.spec.managedBy) == has(oldSelf.spec.managedBy)"
        " && (!has(self.spec.managedBy) || self.spec.managedBy == oldSelf.spec.managedBy)",
        "spec.managedBy: is fixed when a job is created: create another job",
        message_expression(
            "spec.managedBy: %s cannot replace %s: it is fixed when a job is created, create "
            "another job",
            "self.spec.?managedBy.orValue('nothing')",
            "oldSelf.spec.?managedBy.orValue('nothing')",
        ),
        ".spec.managedBy",
    ),
    Rule(
        f"size(self.metadata.name) <= {NAME_CHARS_MAX}"
        " && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
        f"metadata.name: must be at most {NAME_CHARS_MAX} lower-case letters, digits and dashes: "
        "pod names are derived from it",
        message_expression(
            "metadata.name: %s (%d characters) must be at most "
            f"{NAME_CHARS_MAX} lower-case letters, digits and dashes: "
            "pod names are derived from it",
            "self.metadata.name",
            "size(self.metadata.name)",
        ),
    ),
    Rule(
        "!has(oldSelf.status) || has(self.status)",
        "status: cannot be removed: it is what the scheduler knows; delete the job instead",
        field=".status",
    ),
    Rule(
        "size(self.?status.?assignment.?nodes.orValue([])) in [0, self.spec.nodes]",
        "status.assignment.nodes: is not the whole gang: name spec.nodes nodes or none",
        message_expression(
            "status.assignment.nodes: names %d nodes, spec.nodes is %d: a gang is all or "
            "nothing, name all or none",
            "size(self.status.assignment.nodes)",
            "self.spec.nodes",
        ),
        ".status.assignment",
    ),
)


class FlyerJob(StrictModel):
    """FlyerJob is a job that runs on a gang of whole nodes. `flyer run` takes the same file."""

    api_version: Literal["fireflyer.dev/v1alpha1"] = API_VERSION
    kind: Literal["FlyerJob"] = KIND_JOB
    metadata: ObjectMeta
    spec: FlyerJobSpec
    status: FlyerJobStatus | None = None

    @property
    def key(self) -> str:
        """`namespace/name`: what the scheduler calls the job."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def queue(self) -> str:
        """Name of the queue in output and reports."""
        return self.spec.queue or self.metadata.labels.get(QUEUE_LABEL) or DEFAULT_QUEUE

    @property
    def others(self) -> str:
        """The controller that runs the job instead of the operator; empty: the operator runs it."""
        named = self.spec.managed_by or MANAGER
        return "" if named == MANAGER else named

    @property
    def user(self) -> str:
        """User who submitted the job, for quotas and reports.

        A service account counts as its namespace: a user who may edit a namespace can create any
        number of accounts in it, and each would have a separate quota.
        """
        user = self.metadata.annotations.get(USER_ANNOTATION) or self.metadata.namespace
        if user.startswith(SERVICE_ACCOUNT_PREFIX):
            user = user.removeprefix(SERVICE_ACCOUNT_PREFIX).partition(":")[0]
        return user[:USER_CHARS_MAX]

    @property
    def changed_by(self) -> str:
        """User who last changed the desired state of the job."""
        return self.metadata.annotations.get(CHANGED_BY_ANNOTATION, "")[:USER_CHARS_MAX] or "user"

    @property
    def change_reason(self) -> str:
        """Why, in that person's words."""
        return self.metadata.annotations.get(REASON_ANNOTATION, "")

    @property
    def requeue_attempt(self) -> int | None:
        """The attempt that is to leave its nodes and queue again, if one is."""
        text = self.metadata.annotations.get(REQUEUE_ANNOTATION, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


__all__ = [
    "JOB_RULES",
    "NAME_CHARS_MAX",
    "CheckpointPolicy",
    "Collectives",
    "CrossZone",
    "FlyerJob",
    "FlyerJobSpec",
    "Preemption",
    "StopMode",
]

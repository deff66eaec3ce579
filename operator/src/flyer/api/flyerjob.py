"""FlyerJob v1alpha1: what a user writes."""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from flyer.api.base import StrictModel
from flyer.api.durations import AboveZero, Duration
from flyer.api.lifecycle import WAIT
from flyer.api.metadata import LABEL, ObjectMeta
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
from flyer.api.rules import Rule, atomic_map, rules, says
from flyer.api.status import NODES_MAX, FlyerJobStatus
from flyer.job.limits import PATH_CHARS_MAX

# Pods are named NAME-ATTEMPT-RANK and a host name has 63 characters: room for a million attempts.
NAME_CHARS_MAX = 51
# Kubernetes bounds no name of a user; the longest of a service account has 339.
USER_CHARS_MAX = 512
# For CEL: the phases in which a job has no nodes yet, or none any more.
WAITING = "[" + ", ".join(f"'{phase.value}'" for phase in WAIT) + "]"
# For `queue` and its like: what people read when nobody said anything.
DEFAULT_QUEUE = "default"
# A domain, a slash, a path, as batch/v1 has it.
_MANAGER = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._~A-Za-z0-9/]+$"
_GROUP = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?(#[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"

SERVICE_ACCOUNT_PREFIX = "system:serviceaccount:"


class CrossZone(StrEnum):
    """Whether the gang may span two zones."""

    NEVER = "never"
    LAST_RESORT = "lastResort"


class StopMode(StrEnum):
    """How a job is ended for good."""

    GRACEFUL = "graceful"
    NOW = "now"


class Preemption(StrictModel):
    """How a job is interrupted."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "duration(self.maxGrace) >= duration(self.grace)",
                "spec.preemption.maxGrace: is shorter than grace: set it to grace or more",
                says(
                    "spec.preemption.maxGrace: %s is shorter than grace %s: set maxGrace to %s or "
                    "more",
                    "self.maxGrace",
                    "self.grace",
                    "self.grace",
                ),
                ".maxGrace",
            )
        )
    )

    grace: Duration = Field(default=Duration("60s"), description="To save in, after the signal")
    max_grace: Duration = Field(
        default=Duration("10m"), description="How far progress may extend the grace"
    )
    min_runtime: Duration = Field(
        default=Duration("15m"), description="Not preempted before it has run so long"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Preemption:
        if self.max_grace < self.grace:
            raise ValueError(
                f"maxGrace {self.max_grace} is shorter than grace {self.grace}: "
                f"set maxGrace to {self.grace} or more"
            )
        return self


class CheckpointPolicy(StrictModel):
    """Where the job saves and how often it means to."""

    path: str = Field(
        min_length=1, max_length=PATH_CHARS_MAX, description="A folder that all nodes see"
    )
    interval: Duration = Field(default=Duration("5m"), description="How often the job means to")


class Collectives(StrictModel):
    """What the scheduler adds to the pods for collective communication."""

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
        default=True, description="Add the hfreduce package and the topology file to the pods"
    )
    daemon: bool = Field(
        default=False,
        description="Run a node's part of HFReduce in a sidecar, hfreduced, instead of in its "
        "ranks",
    )

    @model_validator(mode="after")
    def _the_daemon_is_injected(self) -> Collectives:
        if self.daemon and not self.inject:
            raise ValueError("daemon: is part of what inject adds: set inject too, or neither")
        return self


class FlyerJobSpec(StrictModel):
    """What to run, on how many whole nodes, and how it may be interrupted."""

    nodes: int = Field(ge=1, le=NODES_MAX, description="Whole nodes; the gang is all or nothing")
    ranks_per_node: int = Field(
        default=1, ge=1, le=1024, description="Processes on each node, commonly one a GPU"
    )
    priority: Annotated[Priority, Field(strict=False)] = Field(
        default=Priority.NORMAL,
        description="Higher goes first and may preempt lower; auto: the highest level that a "
        "FlyerQuota names and that has room. May change at any time",
    )
    queue: str | None = Field(
        default=None,
        pattern=LABEL,
        max_length=63,
        description=f"For people and reports. Absent: the job's label {QUEUE_LABEL}, or else "
        f"{DEFAULT_QUEUE}",
    )
    group: str | None = Field(
        default=None,
        pattern=_GROUP,
        max_length=253,
        description='Node class; "a100#A" pins a zone. Absent: any one class',
    )
    cross_zone: Annotated[CrossZone, Field(strict=False)] = Field(
        default=CrossZone.LAST_RESORT,
        description="never: one zone or none; lastResort: two zones if no zone has the nodes and "
        "no other job crosses zones",
    )
    suspend: bool = Field(
        default=False,
        description="true: save, leave the nodes and wait; false: queue again at the old place",
    )
    stop: Annotated[StopMode, Field(strict=False)] | None = Field(
        default=None,
        description="End the job for good: graceful lets it save first, now kills it. Its object, "
        "checkpoints and logs stay; deleting the object stops it at once",
    )
    max_runtime: Annotated[Duration, AboveZero("spec.maxRuntime", "leave the field out")] | None = (
        Field(
            default=None,
            description="Of one attempt; then the job saves and ends. While the job has nodes it "
            "may be lowered and not raised: others wait for its end",
        )
    )
    watchdog: Annotated[Duration, AboveZero("spec.watchdog", "write null")] | None = Field(
        default=Duration("30m"),
        description="Neither progress nor a log line for so long = hung: restarted from its "
        "checkpoint. null: never",
    )
    max_restarts: int = Field(
        default=10,
        ge=0,
        le=10_000,
        description="Consecutive restarts without a newer durable checkpoint",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="As in batch/v1 Job: the job is deleted, with its pods and their logs, so many "
        "seconds after it has ended. Absent: it stays",
    )
    preemption: Preemption = Field(default=Preemption(), description="How the job is interrupted")
    checkpoint: CheckpointPolicy | None = Field(
        default=None, description="Where the job saves and how often it means to"
    )
    collectives: Collectives = Field(
        default=Collectives(), description="What is added to the pods for communication"
    )
    managed_by: str | None = Field(
        default=None,
        pattern=_MANAGER,
        max_length=63,
        description="As in batch/v1 Job: which controller runs the job. Absent, or "
        f"{MANAGER}: this one; it leaves others' jobs alone. Fixed when the job is created",
    )
    template: PodTemplate = Field(
        description="The pod of one node, the same for all nodes of the gang",
        json_schema_extra=atomic_map(),
    )

    @property
    def node_class(self) -> str | None:
        """The part of `group` before `#`."""
        return self.group.partition("#")[0] if self.group else None

    @property
    def zone(self) -> str | None:
        """The zone that `group` pins, if any."""
        return (self.group.partition("#")[2] or None) if self.group else None


# What else decides where a job runs and what it runs: fixed as `nodes` is, while it has nodes and
# once it has ended. An admission policy keeps it so, and that a stop is not taken back: rules here
# would compare templates with every write of the status. `nodes` is compared with the status.
FIXED_FIELDS = ("ranksPerNode", "group", "crossZone", "template")

JOB_RULES = (
    Rule(
        "self.spec.nodes == oldSelf.spec.nodes"
        f" || self.?status.?phase.orValue('{WAIT[0].value}') in {WAITING}",
        "spec.nodes: is fixed while the job has nodes: suspend it first, or create another job",
        says(
            "spec.nodes: %d cannot replace what the job has while it is %s: suspend it first "
            "(spec.suspend: true) and change it once it is Suspended, or create another job",
            "self.spec.nodes",
            "self.status.phase",
        ),
        ".spec.nodes",
    ),
    Rule(
        # By fields, not by optionals: of what these hold the API server knows no length.
        "has(self.spec.managedBy) == has(oldSelf.spec.managedBy)"
        " && (!has(self.spec.managedBy) || self.spec.managedBy == oldSelf.spec.managedBy)",
        "spec.managedBy: is fixed when a job is created: create another job",
        says(
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
        f"metadata.name: is no name for pods: use at most {NAME_CHARS_MAX} lower-case letters, "
        "digits and dashes",
        says(
            "metadata.name: %s (%d characters) cannot begin the names of pods: use at most "
            f"{NAME_CHARS_MAX} lower-case letters, digits and dashes",
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
        says(
            "status.assignment.nodes: names %d nodes, spec.nodes is %d: a gang is all or "
            "nothing, name all or none",
            "size(self.status.assignment.nodes)",
            "self.spec.nodes",
        ),
        ".status.assignment",
    ),
)


class FlyerJob(StrictModel):
    """One job. The same file runs under `flyer run` and under `kubectl apply`."""

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
        """What people and reports call its queue."""
        return self.spec.queue or self.metadata.labels.get(QUEUE_LABEL) or DEFAULT_QUEUE

    @property
    def others(self) -> str:
        """The controller that runs it in place of ours; empty: it is ours."""
        named = self.spec.managed_by or MANAGER
        return "" if named == MANAGER else named

    @property
    def user(self) -> str:
        """Who submitted it, for quotas and reports.

        A service account counts as its namespace: whoever may edit a namespace can make any number
        of accounts in it, and each would have a quota of its own.
        """
        user = self.metadata.annotations.get(USER_ANNOTATION) or self.metadata.namespace
        if user.startswith(SERVICE_ACCOUNT_PREFIX):
            user = user.removeprefix(SERVICE_ACCOUNT_PREFIX).partition(":")[0]
        return user[:USER_CHARS_MAX]

    @property
    def changed_by(self) -> str:
        """Who asked last for what it is to do now."""
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
    "FIXED_FIELDS",
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

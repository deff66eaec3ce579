"""FlyerJob v1alpha1: what a user writes."""

# ruff: noqa: TC001, RUF012 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flyer.api.base import OpenModel, StrictModel
from flyer.api.durations import Duration, PositiveDuration
from flyer.api.names import API_VERSION, KIND_JOB, USER_ANNOTATION
from flyer.api.podtemplate import PodTemplate
from flyer.api.priorities import Priority
from flyer.api.status import FlyerJobStatus
from flyer.api.timestamps import Timestamp

# A DNS label: it becomes part of host names and of folders.
_NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_GROUP = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?(#[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"


class CrossZone(StrEnum):
    """Whether the gang may span two zones."""

    NEVER = "never"
    LAST_RESORT = "lastResort"


class Preemption(StrictModel):
    """How a job is interrupted."""

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

    path: str = Field(min_length=1)
    interval: Duration = Duration("5m")


class Collectives(StrictModel):
    """What the scheduler adds to the pods for collective communication."""

    inject: bool = True


class FlyerJobSpec(StrictModel):
    """What to run, on how many whole nodes, and how it may be interrupted."""

    nodes: int = Field(ge=1, le=100_000, description="Whole nodes; the gang is all or nothing")
    ranks_per_node: int = Field(default=1, ge=1, le=1024)
    priority: Annotated[Priority, Field(strict=False)] = Priority.NORMAL
    queue: str = Field(default="default", pattern=_NAME)
    group: str | None = Field(
        default=None,
        pattern=_GROUP,
        max_length=253,
        description='Node class; "a100#A" pins a zone. Absent: any one class',
    )
    cross_zone: Annotated[CrossZone, Field(strict=False)] = CrossZone.LAST_RESORT
    suspend: bool = False
    max_runtime: PositiveDuration | None = Field(default=None, description="Of one attempt")
    watchdog: PositiveDuration | None = Field(
        default=Duration("30m"), description="Neither progress nor a log line for so long = hung"
    )
    max_restarts: int = Field(
        default=10,
        ge=0,
        le=10_000,
        description="Consecutive restarts without a newer durable checkpoint",
    )
    preemption: Preemption = Preemption()
    checkpoint: CheckpointPolicy | None = None
    collectives: Collectives = Collectives()
    template: PodTemplate

    @property
    def node_class(self) -> str | None:
        """The part of `group` before `#`."""
        return self.group.partition("#")[0] if self.group else None

    @property
    def zone(self) -> str | None:
        """The zone that `group` pins, if any."""
        return (self.group.partition("#")[2] or None) if self.group else None


class ObjectMeta(OpenModel):
    """The part of Kubernetes' metadata that we read."""

    name: str = Field(pattern=_NAME)
    namespace: str = Field(default="default", pattern=_NAME)
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: Annotated[Timestamp, Field(strict=False)] | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


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
    def user(self) -> str:
        """Who submitted it."""
        return self.metadata.annotations.get(USER_ANNOTATION) or self.metadata.namespace


__all__ = [
    "CheckpointPolicy",
    "Collectives",
    "CrossZone",
    "FlyerJob",
    "FlyerJobSpec",
    "ObjectMeta",
    "Preemption",
]

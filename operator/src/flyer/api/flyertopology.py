"""FlyerTopology v1alpha1: the zones of the cluster, and the job that may cross them.

There is one object, named `cluster`. Its status holds the token: at most one job crosses zones.
The token is taken in one compare-and-swap on `status.holder` before the job's pods start, and is
taken back by a write that empties it, by the leader that gave it or by a later one; a single write
never moves it from one job to another. `status.epoch` is the fencing epoch of the leader that
wrote last: the API server refuses a lower one.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from flyer.api.base import Model, StrictModel
from flyer.api.conditions import Conditions
from flyer.api.durations import Duration
from flyer.api.metadata import LABEL, LABEL_VALUE, ClusterMeta
from flyer.api.names import API_VERSION, KIND_TOPOLOGY
from flyer.api.priorities import Priority
from flyer.api.rules import Rule, list_map, list_set, message_expression, rules
from flyer.api.timestamps import Timestamp


class Zone(StrictModel):
    """One network zone: a separate fat tree."""

    name: str = Field(
        pattern=LABEL_VALUE,
        max_length=63,
        description="Name of the zone: the value of the node label fireflyer.dev/zone.",
    )
    leaves: tuple[str, ...] = Field(
        default=(),
        strict=False,
        max_length=1_000,
        description="Leaf switches of the zone that may be used: values of the node label "
        "fireflyer.dev/leaf. Empty: all leaves.",
        json_schema_extra={**list_set(), "items": {"type": "string", "maxLength": 63}},
    )


class PriorityLimits(StrictModel):
    """Lower limits for the jobs of one priority. An absent field means the general limit."""

    priority: Annotated[Priority, Field(strict=False)] = Field(
        description="Priority at which a job holds its nodes."
    )
    checkpoint_grace_period: Duration | None = Field(
        default=None, description="Upper limit of spec.preemption.checkpointGracePeriod."
    )
    max_checkpoint_grace_period: Duration | None = Field(
        default=None, description="Upper limit of spec.preemption.maxCheckpointGracePeriod."
    )
    min_runtime: Duration | None = Field(
        default=None, description="Upper limit of spec.preemption.minRuntime."
    )


class PreemptionLimits(StrictModel):
    """Upper limits of what jobs may request. The scheduler reduces larger values to the limit."""

    checkpoint_grace_period: Duration = Field(
        default=Duration("15m"),
        description="Upper limit of spec.preemption.checkpointGracePeriod. Default: 15m.",
    )
    max_checkpoint_grace_period: Duration = Field(
        default=Duration("1h"),
        description="Upper limit of spec.preemption.maxCheckpointGracePeriod. Default: 1h.",
    )
    min_runtime: Duration = Field(
        default=Duration("2h"),
        description="Upper limit of spec.preemption.minRuntime. Default: 2h.",
    )
    checkpoint_interval: Duration = Field(
        default=Duration("30m"),
        description="Upper limit of spec.checkpoint.interval when the scheduler compares lost "
        "work. A job without a checkpoint for 3 intervals is preempted first. Default: 30m.",
    )
    priorities: tuple[PriorityLimits, ...] = Field(
        default=(),
        strict=False,
        max_length=9,
        description="Lower limits for the jobs of single priorities.",
        json_schema_extra=list_map("priority"),
    )


class RemovalBudget(StrictModel):
    """Number of nodes of a class that may be out without a known fault: the larger of both."""

    nodes: int = Field(
        default=2, ge=0, le=100_000, description="Number of nodes of a node class. Default: 2."
    )
    percent: int = Field(
        default=10,
        ge=0,
        le=100,
        description="Percentage of the nodes of a node class. Range: 0 to 100. Default: 10.",
    )


class FinishedJobs(StrictModel):
    """How long finished FlyerJobs are kept as objects in etcd, with their pods and logs."""

    ttl_seconds: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="Value of spec.ttlSecondsAfterFinished, in seconds, for jobs that do not set "
        "it. If absent, these jobs are kept.",
    )
    per_namespace: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="Maximum number of finished jobs in a namespace. Beyond it the jobs that "
        "finished first are deleted. Default: 1000.",
    )


class FlyerTopologySpec(StrictModel):
    """Desired use of the network: its zones, and how many gangs may span two of them."""

    zones: tuple[Zone, ...] = Field(
        default=(),
        strict=False,
        max_length=64,
        description="Zones that may be used. Nodes of other zones get no gangs. Empty: all zones "
        "that node labels name.",
        json_schema_extra=list_map("name"),
    )
    cross_zone_jobs: int = Field(
        default=1,
        ge=0,
        le=1,
        description="Maximum number of jobs that span two zones at the same time. Range: 0 to 1. "
        "Default: 1.",
    )
    team_label: str = Field(
        default="",
        max_length=317,
        pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?$"
        "|^$",
        description="Name of the namespace label whose value is the team of the jobs, for "
        "FlyerQuota spec.team. Users who may edit the objects of a namespace cannot change its "
        "labels. Empty: there are no teams.",
    )
    limits: PreemptionLimits = Field(
        default=PreemptionLimits(),
        description="Upper limits of spec.preemption of all FlyerJobs. The scheduler applies the "
        "lower of the job's value and the limit.",
    )
    removal_budget: RemovalBudget = Field(
        default=RemovalBudget(),
        description="Maximum number of nodes of each node class that get no new work because their "
        "health cannot be observed (NodeHealth Unknown). Further ones stay usable and are reported "
        "as held. Nodes with a hardware fault, lost nodes and drained nodes never get new work and "
        "do not count.",
    )
    finished_jobs: FinishedJobs = Field(
        default=FinishedJobs(), description="How long, and how many, finished FlyerJobs are kept."
    )


class TokenHolder(Model):
    """The job that holds the token and may cross zones."""

    namespace: str = Field(
        pattern=LABEL, max_length=63, description="Namespace of the job that holds the token."
    )
    job: str = Field(
        pattern=LABEL, max_length=63, description="Name of the job that holds the token."
    )
    epoch: int = Field(
        ge=1, description="Fencing epoch of the leader that gave the token. Minimum: 1."
    )
    since: Timestamp = Field(description="Time at which the job got the token.")


class ZoneCount(Model):
    """Numbers of nodes of one zone."""

    name: str = Field(max_length=63, description="Name of the network zone.")
    nodes: int = Field(ge=0, description="Number of nodes of the zone.")
    ready_nodes: int = Field(ge=0, description="Number of nodes that may get new work.")


class FlyerTopologyStatus(Model):
    """Observed state: the holder of the token, and the nodes of each zone."""

    epoch: int = Field(
        default=0, ge=0, description="Fencing epoch of the leader that wrote this status."
    )
    holder: TokenHolder | None = Field(
        default=None, description="The one job that may cross zones. Absent if no job does."
    )
    zones: tuple[ZoneCount, ...] = Field(
        default=(),
        max_length=64,
        description="Number of nodes of each zone.",
        json_schema_extra=list_map("name"),
    )
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status describes."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(oldSelf.epoch) || (has(self.epoch) && self.epoch >= oldSelf.epoch)",
                "status.epoch: is lower than the one before: a newer leader exists, stop writing",
                message_expression(
                    "status.epoch: %s is lower than %d: a newer leader exists, stop writing and "
                    "elect again",
                    "has(self.epoch) ? string(self.epoch) : 'absent'",
                    "oldSelf.epoch",
                ),
                ".epoch",
            ),
            Rule(
                "!has(oldSelf.holder) || !has(self.holder) ||"
                " (self.holder.__namespace__ == oldSelf.holder.__namespace__"
                " && self.holder.job == oldSelf.holder.job)",
                "status.holder: another job holds the token: release it first (remove the holder "
                "in a write of its own, once the job's nodes are empty)",
                message_expression(
                    "status.holder: %s/%s cannot cross zones while %s/%s does (epoch %d): release "
                    "it first, once its nodes are empty",
                    "self.holder.__namespace__",
                    "self.holder.job",
                    "oldSelf.holder.__namespace__",
                    "oldSelf.holder.job",
                    "oldSelf.holder.epoch",
                ),
                ".holder",
            ),
            Rule(
                "!has(oldSelf.holder) || (has(self.holder)"
                " ? self.holder.epoch >= oldSelf.holder.epoch"
                " : has(self.epoch) && self.epoch >= oldSelf.holder.epoch)",
                "status.holder: only the leader that gave the token, or a later one, may change or "
                "take it back: write with a status.epoch that is not lower",
                message_expression(
                    "status.holder: %s/%s got the token in epoch %d and epoch %s is earlier: elect "
                    "again and write with an epoch that is not lower",
                    "oldSelf.holder.__namespace__",
                    "oldSelf.holder.job",
                    "oldSelf.holder.epoch",
                    "has(self.holder) ? string(self.holder.epoch) : has(self.epoch) ? "
                    "string(self.epoch) : 'absent'",
                ),
                ".holder",
            ),
            Rule(
                "!has(self.holder) || (has(self.epoch) && self.holder.epoch <= self.epoch)",
                "status.holder.epoch: is above status.epoch: write both with your own epoch",
                message_expression(
                    "status.holder.epoch: %d is above status.epoch %s: write both with your "
                    "own epoch",
                    "self.holder.epoch",
                    "has(self.epoch) ? string(self.epoch) : 'absent'",
                ),
                ".holder",
            ),
        )
    )


class FlyerTopology(StrictModel):
    """Zones of the cluster, and the job that may cross them at present."""

    api_version: Literal["fireflyer.dev/v1alpha1"] = API_VERSION
    kind: Literal["FlyerTopology"] = KIND_TOPOLOGY
    metadata: ClusterMeta
    spec: FlyerTopologySpec = FlyerTopologySpec()
    status: FlyerTopologyStatus | None = None


__all__ = [
    "FlyerTopology",
    "FlyerTopologySpec",
    "FlyerTopologyStatus",
    "PreemptionLimits",
    "PriorityLimits",
    "RemovalBudget",
    "TokenHolder",
    "Zone",
    "ZoneCount",
]

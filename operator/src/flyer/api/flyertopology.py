"""FlyerTopology v1alpha1: the zones of the cluster, and who may cross them now.

There is one object, named `cluster`. Its status holds the token: at most one job crosses zones.
The token is taken in one compare-and-swap on `status.holder` before the job's pods start, and is
taken back by a write that empties it, by the leader that gave it or by a later one; it never goes
from one job to another in a single write. `status.epoch` is the fencing epoch of the leader that
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
from flyer.api.rules import Rule, list_map, list_set, rules, says
from flyer.api.timestamps import Timestamp


class Zone(StrictModel):
    """One network zone: a fat tree of its own."""

    name: str = Field(
        pattern=LABEL_VALUE,
        max_length=63,
        description="As nodes say it in the label fireflyer.dev/zone",
    )
    leaves: tuple[str, ...] = Field(
        default=(),
        strict=False,
        max_length=1_000,
        description="Its leaf switches, as nodes say them in fireflyer.dev/leaf; empty: any",
        json_schema_extra={**list_set(), "items": {"type": "string", "maxLength": 63}},
    )


class PriorityLimits(StrictModel):
    """Lower caps for the jobs of one priority. An absent field means the general cap."""

    priority: Annotated[Priority, Field(strict=False)] = Field(
        description="The priority at which a job holds its nodes"
    )
    checkpoint_grace_period: Duration | None = Field(
        default=None, description="Upper limit of spec.preemption.checkpointGracePeriod."
    )
    max_checkpoint_grace_period: Duration | None = Field(
        default=None, description="Upper limit of spec.preemption.maxCheckpointGracePeriod."
    )
    min_runtime: Duration | None = Field(
        default=None, description="Cap of spec.preemption.minRuntime"
    )


class PreemptionLimits(StrictModel):
    """Caps on what jobs may ask for; the scheduler clamps what is above them."""

    checkpoint_grace_period: Duration = Field(
        default=Duration("15m"),
        description="Upper limit of spec.preemption.checkpointGracePeriod. Default: 15m.",
    )
    max_checkpoint_grace_period: Duration = Field(
        default=Duration("1h"),
        description="Upper limit of spec.preemption.maxCheckpointGracePeriod. Default: 1h.",
    )
    min_runtime: Duration = Field(
        default=Duration("2h"), description="Cap of spec.preemption.minRuntime. Default: 2h"
    )
    checkpoint_interval: Duration = Field(
        default=Duration("30m"),
        description="Cap of spec.checkpoint.interval where the scheduler compares lost work. A job "
        "that has not saved for 3 intervals is preempted first. Default: 30m",
    )
    priorities: tuple[PriorityLimits, ...] = Field(
        default=(),
        strict=False,
        max_length=9,
        description="Lower caps by priority",
        json_schema_extra=list_map("priority"),
    )


class RemovalBudget(StrictModel):
    """How many nodes of a class may be out at once without hard evidence: the larger number."""

    nodes: int = Field(default=2, ge=0, le=100_000, description="Nodes of a class. Default: 2")
    percent: int = Field(
        default=10, ge=0, le=100, description="Percent of the nodes of a class. Default: 10"
    )


class FinishedJobs(StrictModel):
    """How long ended FlyerJobs stay: objects in etcd, with pods and their logs."""

    ttl_seconds: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="spec.ttlSecondsAfterFinished of jobs that have none. Absent: they stay",
    )
    per_namespace: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="Ended jobs of a namespace; beyond it the ones that ended first are deleted. "
        "Default: 1000",
    )


class FlyerTopologySpec(StrictModel):
    """What the network looks like, and how many gangs may span it."""

    zones: tuple[Zone, ...] = Field(
        default=(),
        strict=False,
        max_length=64,
        description="Zones that may be used: nodes of other zones get no gangs. Empty: every zone "
        "that a node's label names",
        json_schema_extra=list_map("name"),
    )
    cross_zone_jobs: int = Field(
        default=1, ge=0, le=1, description="Jobs that may span two zones at once; 0: none"
    )
    team_label: str = Field(
        default="",
        max_length=317,
        pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?$"
        "|^$",
        description="The label of namespaces whose value is the team of their jobs, for FlyerQuota "
        "spec.team. Users who may edit a namespace's objects may not change its labels. Empty: no "
        "teams",
    )
    limits: PreemptionLimits = Field(
        default=PreemptionLimits(),
        description="Caps on spec.preemption of all FlyerJobs. The scheduler applies the lower of "
        "the job's value and the cap",
    )
    removal_budget: RemovalBudget = Field(
        default=RemovalBudget(),
        description="Nodes whose health cannot be observed (NodeHealth Unknown) get no new work, "
        "up to this number in each node class; further ones stay usable and are reported as held. "
        "Nodes with a hardware fault, lost nodes and drains by people are always out and spend "
        "nothing of it",
    )
    finished_jobs: FinishedJobs = Field(
        default=FinishedJobs(), description="How long ended FlyerJobs stay, and how many"
    )


class TokenHolder(Model):
    """The job that may cross zones."""

    namespace: str = Field(pattern=LABEL, max_length=63, description="Its namespace")
    job: str = Field(pattern=LABEL, max_length=63, description="Its name")
    epoch: int = Field(ge=1, description="The fencing epoch of the leader that gave it the token")
    since: Timestamp = Field(description="When it got the token")


class ZoneCount(Model):
    """What a zone has."""

    name: str = Field(max_length=63, description="The zone")
    nodes: int = Field(ge=0, description="Nodes with this label")
    ready_nodes: int = Field(ge=0, description="Those that may get new work")


class FlyerTopologyStatus(Model):
    """Who holds the token; what the zones have."""

    epoch: int = Field(
        default=0, ge=0, description="The fencing epoch of the leader that wrote this"
    )
    holder: TokenHolder | None = Field(
        default=None, description="The one job that may cross zones; absent: nobody"
    )
    zones: tuple[ZoneCount, ...] = Field(
        default=(),
        max_length=64,
        description="Nodes by zone",
        json_schema_extra=list_map("name"),
    )
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status is about"
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(oldSelf.epoch) || (has(self.epoch) && self.epoch >= oldSelf.epoch)",
                "status.epoch: is lower than the one before: a newer leader exists, stop writing",
                says(
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
                says(
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
                says(
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
                says(
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
    """The zones of the cluster, and the one job that may cross them now."""

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

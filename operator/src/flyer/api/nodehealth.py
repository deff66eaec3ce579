"""NodeHealth v1alpha1: what a node's agent sees of its hardware, and what people hold against it.

One object a node, named as the node. `spec` is people's: a drain with its reason and its owner.
`status` is the agent's own: it writes when something changed, never periodically. The scheduler
gives a node new work when nobody drains it and its state is Healthy or Suspect; a node without a
NodeHealth counts as healthy.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from flyer.api.base import Model, StrictModel
from flyer.api.conditions import Conditions
from flyer.api.metadata import ClusterMeta
from flyer.api.names import API_VERSION, KIND_HEALTH
from flyer.api.rules import Rule, list_map, rules, says
from flyer.api.timestamps import Timestamp


class HealthState(StrEnum):
    """Of a device, and of the node as a whole."""

    HEALTHY = "Healthy"
    SUSPECT = "Suspect"  # still given work; to be validated
    UNHEALTHY = "Unhealthy"
    RECOVERING = "Recovering"  # on probation: the fault is over, the proof is not there yet
    UNKNOWN = "Unknown"  # cannot be observed, for instance because the driver hangs


class Drain(StrictModel):
    """Somebody wants the node empty. Only whoever set it should take it back."""

    reason: str = Field(min_length=1, max_length=1024, description="Why, for others to read")
    by: str = Field(min_length=1, max_length=253, description="Who; others should not undo it")
    since: Annotated[Timestamp, Field(strict=False)] | None = Field(
        default=None, description="Since when"
    )


class NodeHealthSpec(StrictModel):
    """What people want of the node."""

    drain: Drain | None = Field(
        default=None,
        description="Empty the node and keep new work away: the gang that runs there saves, leaves "
        "all its nodes and queues again at its place. `kubectl cordon` only keeps new work away",
    )


class Inventory(Model):
    """What the node has."""

    gpu_model: str = Field(default="", max_length=128, description="As the driver calls it")
    gpus: int = Field(default=0, ge=0, le=64, description="GPUs")
    bridge_pairs: int = Field(default=0, ge=0, le=32, description="Pairs joined by NVLink bridges")
    hcas: int = Field(default=0, ge=0, le=64, description="RDMA host channel adapters")
    numa_nodes: int = Field(default=0, ge=0, le=64, description="NUMA nodes")
    driver_version: str = Field(default="", max_length=64, description="Of the GPU driver")


class DeviceHealth(Model):
    """One device that is not, or lately was not, healthy."""

    id: str = Field(min_length=1, max_length=63, description="As the device plugin names it")
    kind: Literal["GPU", "NVLinkPair", "HCA", "Node"] = Field(description="What it is")
    state: HealthState = Field(description="How it is")
    reason: str = Field(default="", max_length=128, description="Why, as one word, such as Xid79")
    message: str = Field(default="", max_length=1024, description="Why, with numbers")
    evidence: str = Field(default="", max_length=2048, description="What was seen: a log line, …")
    recovery: str = Field(
        default="", max_length=256, description="What ends it: a reset, a reboot, a validation"
    )
    since: Timestamp = Field(description="Since when it is so")

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.state in ['Healthy', 'Unknown'] || (has(self.reason) && self.reason != '')",
                "reason: is missing: a device that is not healthy needs a cause, such as Xid79",
                says(
                    "reason: is missing for device %s in state %s: name the cause as one word, "
                    "such as Xid79",
                    "self.id",
                    "self.state",
                ),
                ".reason",
            ),
            Rule(
                "self.state != 'Unhealthy' || (has(self.recovery) && self.recovery != '')",
                "recovery: is missing: nothing is taken out without a way back; say what ends it",
                says(
                    "recovery: is missing for device %s (%s): nothing is taken out without a way "
                    "back, say what ends it",
                    "self.id",
                    "self.state",
                ),
                ".recovery",
            ),
        )
    )


class Fault(Model):
    """Something that happened to a device; kept for evidence after the device has recovered."""

    time: Timestamp = Field(description="When it was seen last")
    device: str = Field(default="", max_length=63, description="Which device")
    code: str = Field(min_length=1, max_length=64, description="Such as Xid79 or LinkDowned")
    message: str = Field(default="", max_length=1024, description="As it was reported")
    count: int = Field(default=1, ge=1, description="How often in a row")


class Check(Model):
    """One check of a validation."""

    name: str = Field(min_length=1, max_length=63, description="Which check")
    verdict: Literal["Pass", "Warn", "Fail", "Error", "Skip"] = Field(
        description="Error: could not be run, which is not a pass"
    )
    message: str = Field(default="", max_length=512, description="Measured and expected values")


class Validation(Model):
    """The latest validation of the node."""

    tier: Literal["Preflight", "Weekly", "Deep"] = Field(description="How thorough")
    verdict: Literal["Pass", "Warn", "Fail", "Error"] = Field(description="Of all checks")
    time: Timestamp = Field(description="When it ended")
    expires_at: Timestamp | None = Field(default=None, description="When the next one is overdue")
    checks: tuple[Check, ...] = Field(
        default=(), max_length=64, description="By name", json_schema_extra=list_map("name")
    )


class NodeHealthStatus(Model):
    """What the node's agent sees."""

    state: HealthState = Field(description="The worst of what keeps gangs away")
    reason: str = Field(default="", max_length=128, description="Why, as one word")
    message: str = Field(default="", max_length=1024, description="Why, with numbers")
    since: Timestamp | None = Field(default=None, description="Since when the state is so")
    boot_id: str = Field(default="", max_length=64, description="The kernel's boot id")
    agent_version: str = Field(default="", max_length=64, description="Who observes")
    inventory: Inventory | None = Field(default=None, description="What the node has")
    devices: tuple[DeviceHealth, ...] = Field(
        default=(),
        max_length=128,
        description="Devices that are not, or lately were not, healthy",
        json_schema_extra=list_map("id"),
    )
    faults: tuple[Fault, ...] = Field(
        default=(), max_length=64, description="What happened, the newest first"
    )
    validation: Validation | None = Field(default=None, description="The latest one")
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status is about"
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.state == 'Healthy' || (has(self.reason) && self.reason != '')",
                "status.reason: is missing: a node that is not healthy needs a cause",
                says(
                    "status.reason: is missing in state %s: name the cause as one word, such "
                    "as Xid79",
                    "self.state",
                ),
                ".reason",
            ),
            Rule(
                "self.state != 'Unhealthy' || (has(self.devices) &&"
                " self.devices.exists(one, one.state == 'Unhealthy'))"
                " || (has(self.validation) && self.validation.verdict == 'Fail')",
                "status.state: Unhealthy needs evidence: an unhealthy device in status.devices, or "
                "a status.validation that failed",
                says(
                    "status.state: %s needs evidence: name an unhealthy device in status.devices, "
                    "or a status.validation that failed",
                    "self.state",
                ),
                ".state",
            ),
        )
    )


class NodeHealth(StrictModel):
    """What a node's agent sees of its hardware, and what people hold against the node."""

    api_version: Literal["fireflyer.dev/v1alpha1"] = API_VERSION
    kind: Literal["NodeHealth"] = KIND_HEALTH
    metadata: ClusterMeta
    spec: NodeHealthSpec = NodeHealthSpec()
    status: NodeHealthStatus | None = None

    @property
    def fault(self) -> str:
        """The hardware fault that the node has, in one line; empty: none is known."""
        status = self.status
        if status is None or status.state is not HealthState.UNHEALTHY:
            return ""
        detail = f": {status.message}" if status.message else ""
        return f"{status.reason}{detail}"

    @property
    def unproven(self) -> bool:
        """Whether the node may be well: its health cannot be observed, and nobody drains it."""
        status = self.status
        unknown = status is not None and status.state is HealthState.UNKNOWN
        return unknown and self.spec.drain is None

    @property
    def drained(self) -> str:
        """Who wants the node empty and why, in one line; empty: nobody does."""
        drain = self.spec.drain
        return f"drained by {drain.by}: {drain.reason}" if drain is not None else ""

    @property
    def unfit(self) -> str:
        """Why the node gets no new work, in one line; empty: it may."""
        if self.spec.drain is not None:
            return self.drained
        status = self.status
        if status is None or status.state in (HealthState.HEALTHY, HealthState.SUSPECT):
            return ""
        detail = f": {status.message}" if status.message else ""
        return f"{status.state} ({status.reason}){detail}"


__all__ = [
    "Check",
    "DeviceHealth",
    "Drain",
    "Fault",
    "HealthState",
    "Inventory",
    "NodeHealth",
    "NodeHealthSpec",
    "NodeHealthStatus",
    "Validation",
]

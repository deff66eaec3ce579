"""NodeHealth v1alpha1: health of a node's hardware as its agent observes it, and drains by users.

Each node has one object, with the name of the node. Users write `spec`: a drain with its reason
and its owner. The agent writes `status` when something changed, never periodically. The scheduler
gives a node new work if it is not drained and its state is Healthy or Suspect; a node without a
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
from flyer.api.rules import Rule, list_map, message_expression, rules
from flyer.api.timestamps import Timestamp


class HealthState(StrEnum):
    """State of a device, and of the node as a whole."""

    HEALTHY = "Healthy"
    SUSPECT = "Suspect"  # gets work; a validation is due
    UNHEALTHY = "Unhealthy"
    RECOVERING = "Recovering"  # on probation: the fault is over, a validation has not passed yet
    UNKNOWN = "Unknown"  # cannot be observed, for instance because the driver hangs


class Drain(StrictModel):
    """A drain of the node. Only the user who started it should end it."""

    reason: str = Field(
        min_length=1, max_length=1024, description="Reason of the drain, for other users to read."
    )
    by: str = Field(
        min_length=1,
        max_length=253,
        description="User who drains the node. Other users should not undo the drain.",
    )
    since: Annotated[Timestamp, Field(strict=False)] | None = Field(
        default=None, description="Time since which the node has been drained."
    )


class NodeHealthSpec(StrictModel):
    """Desired state of the node, written by users."""

    drain: Drain | None = Field(
        default=None,
        description="Drains the node. The gang that runs there saves a checkpoint, releases all "
        "its nodes and queues again at its position; the node gets no new work. `kubectl cordon` "
        "only prevents new work.",
    )


class Inventory(Model):
    """Devices and driver of the node."""

    gpu_model: str = Field(
        default="", max_length=128, description="Model of the GPUs, as the driver reports it."
    )
    gpus: int = Field(default=0, ge=0, le=64, description="Number of GPUs of the node.")
    bridge_pairs: int = Field(
        default=0, ge=0, le=32, description="Number of GPU pairs that NVLink bridges connect."
    )
    hcas: int = Field(default=0, ge=0, le=64, description="Number of RDMA host channel adapters.")
    numa_nodes: int = Field(
        default=0, ge=0, le=64, description="Number of NUMA nodes of the machine."
    )
    driver_version: str = Field(default="", max_length=64, description="Version of the GPU driver.")


class DeviceHealth(Model):
    """Device that is unhealthy, or was unhealthy recently."""

    id: str = Field(
        min_length=1,
        max_length=63,
        description="Identifier of the device, as the device plugin names it.",
    )
    kind: Literal["GPU", "NVLinkPair", "HCA", "Node"] = Field(
        description="Kind of the device: GPU, NVLinkPair, HCA or Node."
    )
    state: HealthState = Field(description="State of the device.")
    reason: str = Field(
        default="", max_length=128, description="Reason of the state as one word, such as Xid79."
    )
    message: str = Field(
        default="",
        max_length=1024,
        description="Human-readable details of the state, with numbers.",
    )
    evidence: str = Field(
        default="", max_length=2048, description="Evidence of the state, for example a log line."
    )
    recovery: str = Field(
        default="",
        max_length=256,
        description="What ends the state, for example a reset, a reboot or a validation.",
    )
    since: Timestamp = Field(description="Time since which the device has been in this state.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.state in ['Healthy', 'Unknown'] || (has(self.reason) && self.reason != '')",
                "reason: is missing: a device that is not healthy needs a cause, such as Xid79",
                message_expression(
                    "reason: is missing for device %s in state %s: name the cause as one word, "
                    "such as Xid79",
                    "self.id",
                    "self.state",
                ),
                ".reason",
            ),
            Rule(
                "self.state != 'Unhealthy' || (has(self.recovery) && self.recovery != '')",
                "recovery: is missing: an unhealthy device needs it; name what ends the state",
                message_expression(
                    "recovery: is missing for device %s (%s): name what ends the state, such as "
                    "a reset",
                    "self.id",
                    "self.state",
                ),
                ".recovery",
            ),
        )
    )


class Fault(Model):
    """A fault of a device, kept as evidence after the device has recovered."""

    time: Timestamp = Field(description="Time at which the fault was last observed.")
    device: str = Field(
        default="", max_length=63, description="Identifier of the device that had the fault."
    )
    code: str = Field(
        min_length=1, max_length=64, description="Code of the fault, such as Xid79 or LinkDowned."
    )
    message: str = Field(
        default="", max_length=1024, description="The fault as the hardware or driver reported it."
    )
    count: int = Field(
        default=1, ge=1, description="Number of consecutive occurrences. Minimum: 1."
    )


class Check(Model):
    """Result of one check of a validation."""

    name: str = Field(min_length=1, max_length=63, description="Name of the check.")
    verdict: Literal["Pass", "Warn", "Fail", "Error", "Skip"] = Field(
        description="Verdict of the check. Error: it could not be run, which does not count as a "
        "pass."
    )
    message: str = Field(
        default="", max_length=512, description="Measured and expected values of the check."
    )


class Validation(Model):
    """The latest validation of the node."""

    tier: Literal["Preflight", "Weekly", "Deep"] = Field(
        description="Thoroughness of the validation: Preflight, Weekly or Deep."
    )
    verdict: Literal["Pass", "Warn", "Fail", "Error"] = Field(
        description="Combined verdict of all checks."
    )
    time: Timestamp = Field(description="Time at which the validation ended.")
    expires_at: Timestamp | None = Field(
        default=None, description="Time at which the next validation is overdue."
    )
    checks: tuple[Check, ...] = Field(
        default=(),
        max_length=64,
        description="Results of the checks, by name.",
        json_schema_extra=list_map("name"),
    )


class NodeHealthStatus(Model):
    """Observed state of the node. Only the node's agent writes it."""

    state: HealthState = Field(description="State of the node: the worst state of its devices.")
    reason: str = Field(
        default="", max_length=128, description="Reason of the state as one word, such as Xid79."
    )
    message: str = Field(
        default="",
        max_length=1024,
        description="Human-readable details of the state, with numbers.",
    )
    since: Timestamp | None = Field(
        default=None, description="Time since which the node has been in this state."
    )
    boot_id: str = Field(
        default="", max_length=64, description="Boot identifier of the running kernel."
    )
    agent_version: str = Field(
        default="", max_length=64, description="Version of the agent that wrote this status."
    )
    inventory: Inventory | None = Field(default=None, description="Devices that the node has.")
    devices: tuple[DeviceHealth, ...] = Field(
        default=(),
        max_length=128,
        description="Devices that are unhealthy, or were unhealthy recently.",
        json_schema_extra=list_map("id"),
    )
    faults: tuple[Fault, ...] = Field(
        default=(), max_length=64, description="Recent faults of devices, the newest first."
    )
    validation: Validation | None = Field(
        default=None, description="The latest validation of the node."
    )
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status describes."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.state == 'Healthy' || (has(self.reason) && self.reason != '')",
                "status.reason: is missing: a node that is not healthy needs a cause",
                message_expression(
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
                message_expression(
                    "status.state: %s needs evidence: name an unhealthy device in status.devices, "
                    "or a status.validation that failed",
                    "self.state",
                ),
                ".state",
            ),
        )
    )


class NodeHealth(StrictModel):
    """Health of a node's hardware as its agent observes it, and drains by users."""

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
        """Whether the node may be healthy: its health cannot be observed, and it is not drained."""
        status = self.status
        unknown = status is not None and status.state is HealthState.UNKNOWN
        return unknown and self.spec.drain is None

    @property
    def drained(self) -> str:
        """Initiator and reason of the drain, in one line; empty: the node is not drained."""
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

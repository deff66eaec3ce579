"""The nodes of a FlyerJob: those assigned to its attempt, and those that it still occupies."""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from pydantic import ConfigDict, Field

from flyer.api.base import Model
from flyer.api.conditions import MESSAGE_CHARS_MAX
from flyer.api.limits import BY_CHARS_MAX, NAME_CHARS_MAX, NODES_MAX, ZONE_CHARS_MAX
from flyer.api.rules import Rule, message_expression, rules
from flyer.api.timestamps import Timestamp


class AssignedNode(Model):
    """Node of a gang; the order of nodes is the order of ranks."""

    name: str = Field(max_length=NAME_CHARS_MAX, description="Name of the node.")
    zone: str = Field(max_length=ZONE_CHARS_MAX, description="Network zone of the node.")
    first_rank: int = Field(ge=0, description="Lowest rank that runs on the node.")


class Assignment(Model):
    """The nodes that an attempt runs on, contiguous by zone."""

    epoch: int = Field(
        ge=0, description="Fencing epoch of the leader that assigned the nodes. Minimum: 0."
    )
    nodes: tuple[AssignedNode, ...] = Field(
        min_length=1,
        max_length=NODES_MAX,
        description="Nodes in the order of ranks, contiguous by zone.",
    )
    node_class: str = Field(
        default="", max_length=NAME_CHARS_MAX, description="Node class of all nodes of the gang."
    )
    cross_zone_pair: tuple[str, ...] = Field(
        default=(),
        max_length=2,
        description="The two nodes that exchange data between the zones. Empty if the gang is in "
        "one zone.",
        json_schema_extra={"items": {"type": "string", "maxLength": NAME_CHARS_MAX}},
    )
    same_zone_layout: bool | None = Field(
        default=None,
        description="Whether the number of nodes in each zone, in order, is that of the previous "
        "attempt. If so, sums are computed in the same order and results are bit-identical. Absent "
        "in the first attempt.",
    )
    backfill: bool = Field(
        default=False,
        description="Whether the job was started by backfill, on nodes that a job ahead of it "
        "waits for. That job may preempt it after its minRuntime. Default: false.",
    )
    reserved_at: Timestamp = Field(description="Time at which the nodes were reserved.")
    started_at: Timestamp | None = Field(
        default=None,
        description="Time at which all nodes were empty and the pods were created. Absent before.",
    )
    running_at: Timestamp | None = Field(
        default=None, description="Time at which all pods were running. Absent before."
    )
    restored_step: int | None = Field(
        default=None,
        description="Step of the checkpoint that the attempt started from. Absent without one.",
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.crossZonePair) || size(self.crossZonePair) in [0, 2]",
                "status.assignment.crossZonePair: is one pair of nodes or none: write both or "
                "neither",
                message_expression(
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
    def zone_layout(self) -> tuple[int, ...]:
        """The number of nodes in each zone, in rank order."""
        zones = [node.zone for node in self.nodes]
        return tuple(zones.count(zone) for zone in self.zones)


class Suspension(Model):
    """A suspension in progress: its requester, its reason, and the deadline for the checkpoint."""

    reason: str = Field(
        max_length=128,
        description="Reason of the suspension: Preempted, Suspended, Requeued, NodeDrained, "
        "Yielded, Stopped or DeadlineExceeded.",
    )
    by: str = Field(
        max_length=BY_CHARS_MAX, description="The user or the job that requested the suspension."
    )
    message: str = Field(
        default="",
        max_length=MESSAGE_CHARS_MAX,
        description="Human-readable details of the suspension.",
    )
    since: Timestamp = Field(description="Time of the suspend signal.")
    deadline: Timestamp = Field(
        description="Time at which the job is killed unless it has released its nodes. Progress "
        "reports extend it up to limit."
    )
    limit: Timestamp = Field(description="Latest time to which the deadline can be extended.")
    expired: bool = Field(
        default=False,
        description="Whether the deadline passed before the job released its nodes. Default: "
        "false.",
    )


class OccupiedNode(Model):
    """A node on which processes of this job may still exist."""

    name: str = Field(max_length=NAME_CHARS_MAX, description="Name of the node.")
    zone: str = Field(max_length=ZONE_CHARS_MAX, description="Network zone of the node.")
    attempt: int = Field(
        ge=0, description="Number of the attempt whose processes may exist on the node."
    )


__all__ = ["AssignedNode", "Assignment", "OccupiedNode", "Suspension"]

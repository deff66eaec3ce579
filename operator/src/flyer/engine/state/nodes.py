"""A machine as the scheduler sees it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer.engine.state.preemption_limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from flyer.api import FlyerTopology


@dataclass(frozen=True, slots=True)
class Node:
    """What a driver observed of one node.

    `ready` means that new work may go there. A node that stops being ready keeps the gang that
    runs on it (somebody cordoned it); with `drain` the gang is suspended and queued again. A node
    whose gang is gone is a `NodeLost`.
    """

    name: str
    zone: str
    leaf: str = ""
    node_class: str = "default"
    slots: int = 1
    ready: bool = True
    reason: str = ""
    fault: str = ""  # a hardware fault that is present: NodeHealth says Unhealthy, and why
    drain: str = ""  # a person wants the node empty: who, and why
    # Why its health cannot be observed; the removal budget decides whether it gets new work.
    unproven: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node and whether its loss was reported."""

    node: Node
    lost: str = ""  # the cause; empty: not lost
    # The Node object was deleted: forgotten as soon as no job has processes or a place there.
    removed: bool = False
    # The latest hardware fault, and when it was last known to be present.
    fault: str = ""
    fault_at: float = 0.0
    # The removal budget took the node out: why, and since when its health is not observed.
    out: str = ""
    unproven_at: float | None = None
    # Jobs whose start failed because of this node, with user and time; a start there clears it.
    start_failures: tuple[tuple[str, str, float], ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether new work may go there."""
        return self.node.ready and not self.lost and not self.out


@dataclass(frozen=True, slots=True)
class Zones:
    """FlyerTopology: zones and leaves that get gangs, gangs that may span two zones, and caps."""

    names: tuple[str, ...] = ()  # empty: every zone
    leaves: tuple[str, ...] = ()  # as zone/leaf; a zone that has none here: all of its leaves
    cross_zone_jobs: int = 1
    limits: Limits = DEFAULT_LIMITS
    # Nodes of a class that may be out at once without hard evidence: the larger of the two.
    budget_nodes: int = 2
    budget_percent: int = 10

    @classmethod
    def of(cls, topology: FlyerTopology) -> Zones:
        """What the object says."""
        spec = topology.spec
        return cls(
            tuple(zone.name for zone in spec.zones),
            tuple(f"{zone.name}/{leaf}" for zone in spec.zones for leaf in zone.leaves),
            spec.cross_zone_jobs,
            Limits.of(spec.limits),
            spec.removal_budget.nodes,
            spec.removal_budget.percent,
        )

    def removal_budget(self, nodes: int) -> int:
        """How many of so many nodes of a class may be out at once without hard evidence."""
        return max(self.budget_nodes, nodes * self.budget_percent // 100)

    def admits(self, node: Node) -> bool:
        """Whether the node may get gangs."""
        if self.names and node.zone not in self.names:
            return False
        listed = [leave for leave in self.leaves if leave.startswith(f"{node.zone}/")]
        return not listed or f"{node.zone}/{node.leaf}" in listed


@functools.lru_cache(maxsize=65_536)
def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts a10 after a9."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    )


__all__ = ["Node", "NodeState", "Zones", "natural_order"]

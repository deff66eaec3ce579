"""Nodes as the scheduler sees them, and the zones that it may use."""

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
    """Observations of a driver about one node.

    `ready`: the node may get new work. A node that becomes unready, for example cordoned, keeps its
    running gang; with `drain` the gang is suspended and queued again. A node whose gang is lost is
    reported by NodeLost.
    """

    name: str
    zone: str
    leaf: str = ""
    node_class: str = "default"
    slots: int = 1
    ready: bool = True
    reason: str = ""
    fault: str = ""  # current hardware fault, from a NodeHealth in state Unhealthy
    drain: str = ""  # drain by a user: user and reason
    # Why its health is unknown. The removal budget decides whether it gets new work.
    unproven: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node and its failures."""

    node: Node
    lost: str = ""  # the cause; empty: not lost
    # The Node object was deleted; the entry is dropped when no job uses the node.
    removed: bool = False
    # The latest hardware fault, and the last time at which it was present.
    fault: str = ""
    fault_at: float = 0.0
    # Why the removal budget excludes the node, and since when its health is unknown.
    out: str = ""
    unproven_at: float | None = None
    # Failed starts on this node (job, user, time). A successful start clears them.
    start_failures: tuple[tuple[str, str, float], ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether new work may go there."""
        return self.node.ready and not self.lost and not self.out


@dataclass(frozen=True, slots=True)
class Zones:
    """FlyerTopology as a value: usable zones and leaves, cross-zone jobs, limits."""

    names: tuple[str, ...] = ()  # empty: every zone
    leaves: tuple[str, ...] = ()  # as zone/leaf; a zone without an entry has no restriction
    cross_zone_jobs: int = 1
    limits: Limits = DEFAULT_LIMITS
    # Removal budget per node class: the larger of the two.
    budget_nodes: int = 2
    budget_percent: int = 10

    @classmethod
    def of(cls, topology: FlyerTopology) -> Zones:
        """The value of a FlyerTopology."""
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
        """Removal budget of a node class with this many nodes."""
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

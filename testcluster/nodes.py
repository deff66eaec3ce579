"""Node definitions of a whole cluster: names, zones, leaf switches, classes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NODES", "NodeSpec"]


@dataclass(frozen=True)
class NodeSpec:
    """One node; `dedicated` nodes run only the project's jobs (label and taint)."""

    name: str
    zone: str
    leaf: str
    node_class: str = "a100"
    dedicated: bool = True

    @property
    def labels(self) -> dict[str, str]:
        """The labels that its kubelet registers it with."""
        labels = {
            "topology.kubernetes.io/zone": self.zone,
            "fireflyer.dev/zone": self.zone,
            "fireflyer.dev/leaf": self.leaf,
            "fireflyer.dev/node-class": self.node_class,
        }
        if self.dedicated:
            labels["fireflyer.dev/dedicated"] = "true"
        return labels

    @property
    def taints(self) -> list[dict[str, str]]:
        """The taints that its kubelet registers it with."""
        if not self.dedicated:
            return []
        return [{"key": "fireflyer.dev/dedicated", "value": "true", "effect": "NoSchedule"}]


NODES = (
    NodeSpec("node-a1", "A", "leaf-a1"),
    NodeSpec("node-a2", "A", "leaf-a1"),
    NodeSpec("node-b1", "B", "leaf-b1"),
    NodeSpec("node-b2", "B", "leaf-b1"),
    # Shared with other people's pods: controllers and services run here, and gated gangs too.
    NodeSpec("node-s1", "A", "leaf-a2", node_class="shared", dedicated=False),
)

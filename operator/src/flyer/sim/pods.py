"""Nodes and processes of a simulation: the actual state, independent of the engine's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyer.engine import Node, Outcome
    from flyer.sim.scripts import Script


@dataclass(slots=True)
class Machine:
    """One node."""

    node: Node
    powered: bool = True
    sticky: bool = False  # its processes cannot be ended (stuck in the kernel)
    heard_at: float = 0.0  # arrival time of its latest report


@dataclass(slots=True)
class Pod:
    """The processes of one attempt on one node; removed when the last has ended."""

    job: str
    attempt: int
    node: str
    zone: str
    alive: bool = True
    outcome: Outcome | None = None


@dataclass(slots=True)
class Run:
    """The training that the pods of one attempt do together."""

    job: str
    attempt: int
    script: Script
    nodes: tuple[str, ...]
    step: int
    up: bool = False
    alive: bool = True
    received: bool = False
    released: bool = False
    saved_step: int | None = None
    saved_path: str = ""
    heard_at: float = 0.0  # arrival time of its latest message


@dataclass(slots=True)
class Cluster:
    """All machines, pods and runs."""

    machines: dict[str, Machine] = field(default_factory=dict)
    pods: dict[tuple[str, str, int], Pod] = field(default_factory=dict)
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)

    def pods_on(self, node: str) -> list[Pod]:
        """The pods on a machine that has power."""
        if not self.machines[node].powered:
            return []
        return [pod for pod in self.pods.values() if pod.node == node]

    def live_jobs_on(self, node: str) -> set[tuple[str, int]]:
        """Job and attempt of the processes that run there."""
        return {(pod.job, pod.attempt) for pod in self.pods_on(node) if pod.alive}


__all__ = ["Cluster", "Machine", "Pod", "Run"]

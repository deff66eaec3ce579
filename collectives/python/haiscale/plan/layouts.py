"""A layout with its micro-batches: what memory, traffic and timing are computed for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haiscale.model.hardware import Hardware
    from haiscale.placement import Layout, Sizes
    from haiscale.plan.models import Model

__all__ = ["Candidate", "Precision", "Schedule"]


class Schedule(StrEnum):
    """Pipeline schedules that the planner compares."""

    ONE_F_ONE_B = "1F1B"
    EAGER = "Eager1F1B"


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter's parts."""

    parameter: float = 2
    """bf16, as it is computed with and gathered."""
    gradient: float = 2
    """bf16."""
    optimizer: float = 12
    """AdamW: fp32 parameter and two moments."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model on placed ranks."""

    model: Model
    layout: Layout
    hardware: Hardware
    microbatch: int
    """Sequences of a micro-batch."""
    schedule: Schedule
    recompute: bool
    """Whether a layer's activations are computed again in the backward pass."""
    precision: Precision
    efficiency: float
    """Share of the accelerator's measured matrix rate that a step's computation has."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the axes."""
        return self.layout.sizes

    @property
    def microbatches(self) -> int:
        """Micro-batches of a pipeline in a step."""
        return self.model.batch // (self.sizes.dp * self.sizes.shard * self.microbatch)

    @property
    def stage_layers(self) -> int:
        """Layers of the largest stage."""
        return ceil(self.model.layers / self.sizes.pp)

    @property
    def stage_share(self) -> float:
        """Part of all layers that the largest stage has."""
        return self.stage_layers / self.model.layers

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the first stage holds."""
        stages = self.sizes.pp
        limit = stages if self.schedule is Schedule.ONE_F_ONE_B else 2 * stages - 1
        return min(limit, self.microbatches)

    @property
    def stage_dense(self) -> float:
        """Parameters of the largest stage without routed experts, on one tensor-parallel rank."""
        model, sizes = self.model, self.sizes
        embeddings = 1 if sizes.pp > 1 or model.tied else 2
        dense = model.dense_parameters * self.stage_share + embeddings * model.embedding
        return dense / sizes.tp

    @property
    def stage_experts(self) -> float:
        """Routed experts' parameters of the largest stage on one rank, before sharding."""
        sizes = self.sizes
        return self.model.expert_parameters * self.stage_share / sizes.tp / sizes.ep

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.microbatch * self.model.context

    @property
    def hop_bytes(self) -> float:
        """Activations between two stages, for one micro-batch, of one tensor-parallel rank."""
        return self.tokens * self.model.width * 2 / self.sizes.tp

    def nodes_of(self, axis: str) -> int:
        """Nodes of a group of an axis."""
        nodes = self.layout.nodes
        return len({nodes.node_of(rank) for rank in self.layout.groups(axis)[0]})

    @property
    def replica_nodes(self) -> int:
        """Nodes that hold the same stage."""
        nodes = self.layout.nodes
        stages_per_node = max(1, ceil(self.sizes.pp / len(nodes.names)))
        return max(1, len(nodes.names) * stages_per_node // self.sizes.pp)

"""Predicted time of a step, by parts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from haiscale.model.cards import Sharing
from haiscale.model.hardware import Library
from haiscale.model.pipelines import Pipeline, Times, steady
from haiscale.model.simulator import run
from haiscale.pipeline.schedules import build
from haiscale.plan.layouts import Schedule
from haiscale.plan.traffic import expert_bytes, tensor_bytes

if TYPE_CHECKING:
    from haiscale.plan.layouts import Candidate

__all__ = ["ADAM_BYTES", "Timing", "simulated_pipeline", "timing"]

ADAM_BYTES: Final = 28
"""Memory traffic of AdamW for each parameter."""
BACKWARD: Final = 2
"""Backward pass over forward pass."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step, by parts that add up."""

    computation: float
    """Of all micro-batches, with recomputation."""
    bubble: float
    """Of the pipeline: a rank waits for its first micro-batch, and after its last one."""
    hops: float
    """Activations on their way, where that delays a stage."""
    tensor: float
    experts: float
    gathers: float
    """Of sharded parameters and their gradients, where computation does not hide them."""
    sums: float
    """Of gradients over replicas, likewise."""
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def bubble_share(self) -> float:
        """Part of the step that is bubble."""
        return self.bubble / self.total


def timing(candidate: Candidate) -> Timing:
    """Predicted time of a step."""
    model, sizes, hardware = candidate.model, candidate.sizes, candidate.hardware
    count = candidate.microbatches
    rate = hardware.matmul_rate * candidate.efficiency
    stage = model.forward_operations * candidate.microbatch * candidate.stage_share / sizes.tp
    forward = stage / rate
    computation = forward * (1 + BACKWARD + (1 if candidate.recompute else 0))
    tensor = tensor_bytes(candidate) / count / hardware.nvlink_rate
    inside, outside = expert_bytes(candidate)
    ranks = candidate.layout.nodes.ranks_per_node
    experts = inside / count / hardware.pcie_rate + outside * ranks / count / hardware.card_rate
    slot = computation + tensor + experts
    last_backward = slot * BACKWARD / (1 + BACKWARD)
    sums = _exposed(_sum_seconds(candidate), last_backward, candidate.stage_layers)
    return Timing(
        computation * count,
        slot * (sizes.pp - 1),
        _hops(candidate, slot),
        tensor * count,
        experts * count,
        _gathers(candidate, slot),
        sums,
        _state(candidate) * ADAM_BYTES / hardware.memory_rate,
    )


def _state(candidate: Candidate) -> float:
    """Parameters that a rank's optimizer updates."""
    sizes = candidate.sizes
    experts = candidate.stage_experts / max(1, sizes.shard // sizes.ep)
    return candidate.stage_dense / sizes.shard + experts


def _exposed(transfer: float, hidden_by: float, pieces: int) -> float:
    """Time of a transfer in pieces that the computation of the same pieces does not hide."""
    return max(transfer / pieces, transfer - hidden_by) if transfer else 0.0


def _sum_seconds(candidate: Candidate) -> float:
    """Sum of a stage's gradients over replicas: each shard's part over dp."""
    sizes = candidate.sizes
    dense = candidate.stage_dense * sizes.tp / max(1, candidate.nodes_of("shard"))
    experts = candidate.stage_experts * sizes.tp * sizes.ep / max(1, candidate.nodes_of("ep"))
    gradient = candidate.precision.gradient
    hardware = candidate.hardware
    gpus = sizes.dp * sizes.shard * sizes.tp // max(1, candidate.nodes_of("shard"))
    seconds = 0.0
    if sizes.dp > 1:
        seconds += hardware.allreduce_seconds(dense * gradient, Library.HFREDUCE, gpus)
    if experts and sizes.dp * sizes.shard > max(sizes.ep, sizes.shard):
        seconds += hardware.allreduce_seconds(experts * gradient, Library.HFREDUCE, gpus)
    return seconds


def _gathers(candidate: Candidate, slot: float) -> float:
    """Passes over the shards; per micro-batch without a pipeline, per step with one."""
    sizes, hardware = candidate.sizes, candidate.hardware
    if sizes.shard == 1:
        return 0.0
    experts = candidate.stage_experts if sizes.shard > sizes.ep else 0.0
    size = (candidate.stage_dense + experts) * sizes.tp * candidate.precision.parameter
    one = hardware.allreduce_seconds(size, Library.HFREDUCE, sizes.shard * sizes.tp) / 2
    if sizes.pp > 1:
        return one + one
    layers = candidate.stage_layers
    forward, backward = slot / (1 + BACKWARD), slot * BACKWARD / (1 + BACKWARD)
    exposed = _exposed(one, forward, layers) + _exposed(2 * one, backward, layers)
    return exposed * candidate.microbatches


def _hops(candidate: Candidate, slot: float) -> float:
    """Delay by transfers between stages that take turns on the card.

    1F1B: each round of p micro-batches waits for p - 1 transfers each way. Eager 1F1B: only the
    first and the last micro-batch do. A card that is busy for longer than the slot sets the pace.
    """
    sizes = candidate.sizes
    if sizes.pp == 1:
        return 0.0
    hop = candidate.hop_bytes / _hop_rate(candidate)
    rounds = -(-candidate.microbatches // sizes.pp)
    is_eager = candidate.schedule is Schedule.EAGER
    delay = 2 * (sizes.pp - 1) * hop * (1 if is_eager else rounds)
    if candidate.nodes_of("pp") > 1:
        busy = 2 * candidate.layout.nodes.ranks_per_node * hop
        delay += max(0.0, busy - slot) * candidate.microbatches
    return delay


def _hop_rate(candidate: Candidate) -> float:
    is_between = candidate.nodes_of("pp") > 1
    return candidate.hardware.card_rate if is_between else candidate.hardware.pcie_rate


def simulated_pipeline(candidate: Candidate) -> float:
    """Computation, bubble and hops of a pipeline by the event model, in seconds.

    For pipelines over several nodes. Replicas of a chain take turns on the cards.
    """
    parts = timing(candidate)
    slot = (parts.computation + parts.tensor + parts.experts) / candidate.microbatches
    sizes = candidate.sizes
    forward = slot / (1 + BACKWARD)

    def simulated(microbatches: int) -> float:
        actions, nodes, _ = Pipeline(
            build(candidate.schedule, ranks=sizes.pp, microbatches=microbatches),
            candidate.layout.nodes.ranks_per_node,
            Times(forward, slot - forward),
            candidate.hop_bytes / candidate.hardware.card_rate,
        ).build()
        return run(actions, nodes, sharing=Sharing.TURNS).seconds

    return steady(simulated, candidate.microbatches, sizes.pp)

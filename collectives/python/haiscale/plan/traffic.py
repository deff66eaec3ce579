"""Bytes of a step on each kind of link."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haiscale.plan.layouts import Candidate

__all__ = ["Traffic", "traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a step."""

    card_pipeline: float
    """Sent by the card of the node that sends most: activations and their gradients."""
    card_gradients: float
    """Sums over replicas."""
    card_shards: float
    """Gathers of parameters and scatters of gradients."""
    card_experts: float
    """Tokens to experts on other nodes, and back."""
    node: float
    """Over PCIe of the node: copies of collectives to memory and back, tokens between its ranks."""
    nvlink: float
    """Sent by one accelerator to those that NVLink joins."""
    zones: float
    """From one zone to another one, each way, over all pairs of nodes."""

    @property
    def card(self) -> float:
        """Sent by the card of a node."""
        return self.card_pipeline + self.card_gradients + self.card_shards + self.card_experts


def traffic(candidate: Candidate) -> Traffic:
    """Traffic of a step."""
    sizes, nodes = candidate.sizes, candidate.layout.nodes
    ranks = nodes.ranks_per_node
    between_nodes = sizes.pp > 1 and candidate.nodes_of("pp") > 1
    ways = 2 if sizes.pp > 2 else 1
    pipeline = ranks * candidate.microbatches * candidate.hop_bytes
    gradients, shards = _stage_bytes(candidate)
    replicas = candidate.replica_nodes
    shard_nodes = candidate.nodes_of("shard")
    sums = gradients * 2 * (1 if replicas // shard_nodes > 1 else 0)
    gathers = shards * (shard_nodes - 1) / shard_nodes * _passes(candidate)
    inside, outside = expert_bytes(candidate)
    copies = ranks * _copied_bytes(candidate)
    zones = len(set(nodes.zones))
    crossing = 0.0
    if zones > 1:
        crossing = gradients * shard_nodes * sizes.pp
        if _chain_crosses(candidate):
            crossing += pipeline
    return Traffic(
        ways * pipeline if between_nodes else 0.0,
        sums,
        gathers,
        outside * ranks,
        copies + inside * ranks + (0.0 if between_nodes or sizes.pp == 1 else ways * pipeline),
        tensor_bytes(candidate),
        crossing,
    )


def _stage_bytes(candidate: Candidate) -> tuple[float, float]:
    """Gradients that a node sums over replicas, and parameters of a stage that are sharded."""
    sizes, precision = candidate.sizes, candidate.precision
    stage = (candidate.stage_dense + candidate.stage_experts * sizes.ep) * sizes.tp
    sharded = stage * precision.parameter if sizes.shard > 1 else 0.0
    summed = stage * precision.gradient if sizes.dp > 1 else 0.0
    return summed / max(1, candidate.nodes_of("shard")), sharded


def _copied_bytes(candidate: Candidate) -> float:
    """Bytes that a rank copies to and from its node's memory for sums, gathers and scatters."""
    sizes, precision = candidate.sizes, candidate.precision
    held = candidate.stage_dense + candidate.stage_experts
    summed = 2 * held / sizes.shard * precision.gradient if sizes.dp > 1 else 0.0
    others = held * (1 - 1 / sizes.shard) * precision.parameter
    return summed + others * _passes(candidate)


def _passes(candidate: Candidate) -> int:
    """Gathers and scatters of a stage in a step."""
    if candidate.sizes.shard == 1:
        return 0
    return 2 if candidate.sizes.pp > 1 else 3 * candidate.microbatches


def tensor_bytes(candidate: Candidate) -> float:
    """Sent by a rank for the sums of tensor parallelism in a step."""
    sizes, model = candidate.sizes, candidate.model
    if sizes.tp == 1:
        return 0.0
    size = candidate.tokens * model.width * 2
    sums = 4 * candidate.stage_layers * candidate.microbatches
    return sums * size * 2 * (sizes.tp - 1) / sizes.tp


def expert_bytes(candidate: Candidate) -> tuple[float, float]:
    """Sent by a rank for experts in a step: to ranks of its node, and to other nodes.

    A token is sent once to each other node that it visits, with uniform routing.
    """
    sizes, model = candidate.sizes, candidate.model
    if sizes.ep == 1 or not model.experts:
        return 0.0, 0.0
    size = candidate.tokens * model.width * 2 / sizes.tp
    layers = candidate.stage_layers * model.expert_layers / model.layers
    times = 4 * layers * candidate.microbatches  # dispatch and combine, forward and backward
    nodes = candidate.nodes_of("ep")
    per_node = sizes.ep // nodes
    here = model.experts_per_token / nodes * (per_node - 1) / per_node
    elsewhere = model.experts - model.experts // nodes
    missed = _chance_of_none(elsewhere, model.experts, model.experts_per_token)
    visited = (nodes - 1) * (1 - missed)
    return times * size * here, times * size * visited


def _chance_of_none(others: int, experts: int, chosen: int) -> float:
    """Probability that all chosen experts are among the others."""
    if chosen > others:
        return 0.0

    def ways(number: int) -> float:
        return lgamma(number + 1) - lgamma(number - chosen + 1)

    return exp(ways(others) - ways(experts))


def _chain_crosses(candidate: Candidate) -> bool:
    nodes = candidate.layout.nodes
    return any(
        len({nodes.zone_of(rank) for rank in ranks}) > 1 for ranks in candidate.layout.groups("pp")
    )

"""Memory of the rank that needs most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haiscale.plan.layouts import Candidate

__all__ = ["Memory", "memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory(candidate: Candidate) -> Memory:
    """Memory of a rank of the first stage, which holds most activations.

    Sharded parameters are gathered one layer at a time without a pipeline, and two layers are there
    at once. With a pipeline they are gathered for the whole step and gradients are scattered at its
    end, so only the optimizer's state is sharded.
    """
    sizes, precision = candidate.sizes, candidate.precision
    dense, experts = candidate.stage_dense, candidate.stage_experts
    kept = dense / sizes.shard + experts / max(1, sizes.shard // sizes.ep)
    held = dense + experts
    gathered = 0.0
    if sizes.shard > 1 and sizes.pp == 1:
        gathered = 2 * (held - kept) / candidate.stage_layers
        held = kept
    return Memory(
        (held + gathered) * precision.parameter,
        (held + gathered) * precision.gradient,
        kept * precision.optimizer,
        _activations(candidate),
    )


def _activations(candidate: Candidate) -> float:
    model, sizes = candidate.model, candidate.sizes
    layer = model.activation_bytes * candidate.tokens / sizes.tp
    layers = candidate.stage_layers
    if candidate.recompute:
        kept = 2.0 * model.width * candidate.tokens * layers
        stages = kept * candidate.in_flight + layer
    else:
        stages = layer * layers * candidate.in_flight
    logits = 4.0 * candidate.tokens * model.vocabulary / sizes.tp
    # The last stage has one micro-batch in flight, and the logits in fp32 with their gradient.
    last = stages / candidate.in_flight + 2 * logits
    return max(stages, last) if sizes.pp > 1 else stages + 2 * logits

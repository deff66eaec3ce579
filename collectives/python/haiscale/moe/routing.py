"""Router: chooses the experts of each token, and their weights.

Balance without a loss (Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
Mixture-of-Experts"): a bias for each expert is added where experts are chosen, and only there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Choice", "Router", "Routing"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts."""

    top_k: int
    """Experts of each token."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function of a token's logits. The weights of the chosen experts are scaled to sum 1; with
    one expert its score is the weight."""
    scale: float = 1.0
    """Factor of all weights."""
    balance: Literal["bias", "loss"] | None = "bias"
    """`bias`: `haiscale.moe.balance` after each step. `loss`: add `haiscale.moe.balance_loss`."""
    bias_step: float = 1e-3
    """Change of an expert's bias in each step."""
    capacity_factor: float | None = None
    """Tokens of this rank that an expert takes, as a multiple of the even share; later tokens are
    dropped for this expert. None: nothing is dropped."""
    nodes_per_token: int | None = None
    """Nodes to which a token may be sent, those with the highest sum of their two best scores."""
    nodes: int | None = None
    """Nodes that `nodes_per_token` counts, each with an equal share of the experts. Default: those
    of the links. With a fixed number the choice is the same in every layout."""

    def check(self, experts: int, nodes: int) -> None:
        """Raises ValueError for values that do not fit these experts and nodes."""
        if not 1 <= self.top_k <= experts:
            raise ValueError(f"invalid top_k {self.top_k}: expected 1 to {experts}, the experts")
        if self.score not in {"sigmoid", "softmax"}:
            raise ValueError(f"invalid score {self.score!r}: expected 'sigmoid' or 'softmax'")
        if self.balance not in {"bias", "loss", None}:
            raise ValueError(f"invalid balance {self.balance!r}: expected 'bias', 'loss' or None")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"invalid capacity_factor {self.capacity_factor}: expected above 0")
        if self.nodes_per_token is None:
            return
        count = self.nodes or nodes
        if experts % count:
            raise ValueError(f"{experts} experts do not divide into {count} nodes of equal size")
        if not 1 <= self.nodes_per_token <= count:
            raise ValueError(
                f"invalid nodes_per_token {self.nodes_per_token}: expected 1 to {count}, the nodes"
            )
        if self.top_k > (available := self.nodes_per_token * experts // count):
            raise ValueError(
                f"top_k {self.top_k} is more than the {available} experts on "
                f"{self.nodes_per_token} nodes: choose a larger nodes_per_token"
            )


class Choice(NamedTuple):
    """The experts of each token, by a router."""

    experts: Tensor
    """int64, tokens x top_k: experts in ascending order; -1 where there is none."""
    weights: Tensor
    """float32, tokens x top_k."""
    probabilities: Tensor
    """float32, tokens x experts: scores that sum to 1, for the balance."""

    def check(self, experts: int, tokens: int) -> None:
        """Raises ValueError for what a router of the caller's may do wrong."""
        chosen = self.experts
        if chosen.dim() != 2 or chosen.shape[0] != tokens or self.weights.shape != chosen.shape:
            raise ValueError(
                f"the router returned experts of shape {tuple(chosen.shape)} and weights of shape "
                f"{tuple(self.weights.shape)} for {tokens} tokens: expected tokens x top_k"
            )
        if not tokens:
            return
        if int(chosen.max()) >= experts or int(chosen.min()) < -1:
            raise ValueError(
                f"the router chose an expert outside of 0 to {experts - 1}; -1 means none"
            )
        before = chosen.cummax(1).values[:, :-1]
        if bool(((chosen[:, 1:] <= before) & (chosen[:, 1:] >= 0)).any()):
            raise ValueError("the router's experts of a token are not ascending, each once")


class Router(nn.Module):
    """A linear router; scores are computed in float32."""

    bias: Tensor

    def __init__(self, width: int, experts: int, routing: Routing, nodes: int = 1) -> None:
        super().__init__()
        routing.check(experts, nodes)
        self.routing, self.nodes = routing, routing.nodes or nodes
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.uniform_(self.weight, -1 / math.sqrt(width), 1 / math.sqrt(width))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, tokens: Tensor) -> Choice:
        """The choice for tokens x width."""
        with torch.autocast(tokens.device.type, enabled=False):  # it would compute in bfloat16
            return self._choice(tokens.float())

    def _choice(self, tokens: Tensor) -> Choice:
        logits = functional.linear(tokens, self.weight.float())
        if self.routing.score == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
        else:
            scores = probabilities = logits.softmax(-1)
        chosen = self._chosen(scores.detach() + self.bias).sort(-1).values
        weights = scores.gather(1, chosen)
        if self.routing.top_k > 1:  # a weight that is always 1 would have no gradient
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        return Choice(self._within_capacity(chosen), weights * self.routing.scale, probabilities)

    def _chosen(self, scores: Tensor) -> Tensor:
        limit = self.routing.nodes_per_token
        if limit is not None and limit < self.nodes:
            # A size of -1 would be ambiguous without tokens.
            by_node = scores.view(scores.shape[0], self.nodes, scores.shape[1] // self.nodes)
            best = by_node.topk(min(2, by_node.shape[2]), dim=2).values.sum(2)
            allowed = torch.zeros_like(best, dtype=torch.bool)
            allowed.scatter_(1, best.topk(limit, dim=1).indices, value=True)
            scores = by_node.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
        return scores.topk(self.routing.top_k, dim=1).indices

    def _within_capacity(self, chosen: Tensor) -> Tensor:
        factor = self.routing.capacity_factor
        if factor is None:
            return chosen
        experts = self.weight.shape[0]
        capacity = math.ceil(factor * chosen.numel() / experts)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts)
        starts = counts.cumsum(0) - counts
        place = torch.empty_like(flat)
        place[order] = torch.arange(flat.numel(), device=flat.device) - starts[flat[order]]
        kept = flat.masked_fill(place >= capacity, -1)
        return kept.view_as(chosen)

    def extra_repr(self) -> str:
        """Sizes, for people."""
        experts, width = self.weight.shape
        return f"width={width}, experts={experts}, top_k={self.routing.top_k}"

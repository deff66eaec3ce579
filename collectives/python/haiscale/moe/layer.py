"""`MoE`: a layer whose experts are spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from haiscale.internals.recomputation import ends_recomputation, in_backward
from haiscale.moe import census as counts
from haiscale.moe.errors import MoEError, NonFiniteError
from haiscale.moe.experts import Experts
from haiscale.moe.hops import Pairs
from haiscale.moe.links import Links
from haiscale.moe.passage import route
from haiscale.moe.routing import Router, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from haiscale.moe.census import Census
    from haiscale.moe.routing import Choice

__all__ = ["MoE"]


class MoE(nn.Module):
    """Each token's output is the weighted sum of its experts' and of the shared experts' outputs.

    Args:
        width: Size of a token, the last dimension of the input.
        hidden: Inner size of each expert.
        experts: Number of experts of all ranks; each rank of the links has an equal share.
        routing: How tokens choose experts.
        links: Of `connect`. None: all experts are on this rank.
        shared: A module that every token passes, computed while tokens are under way.
        overlap: False computes `shared` after all exchanges instead; the bits are the same.
        name: For errors. Default: "moe" and the number of the layer among those of the links.

    The forward and backward pass are collective over the links: every rank calls both, also with 0
    tokens. Gradients of `experts` are those of the mean of the losses of the links' ranks: average
    them over `expert_dp`, and all others over all ranks that read different data.

    Raises (forward and backward):
        NonFiniteError: On every rank, if the scores on one are NaN or infinite. No token has moved.
        ExpertMismatchError: On every rank, if a rank has another layer or calls another one.
        ExchangeError: A rank failed or died, or an exchange exceeded the groups' deadline.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        routing: Routing,
        *,
        links: Links | None = None,
        shared: nn.Module | None = None,
        overlap: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.links = links or Links()
        self.index = self.links.layers
        self.links.layers += 1
        self.name = name or f"moe {self.index}"
        if experts < 1 or experts % self.links.size:
            raise ValueError(
                f"layer {self.name!r}: {experts} experts do not divide into {self.links.size} "
                f"ranks: choose a multiple of {self.links.size}"
            )
        self.width, self.count, self.overlap = width, experts, overlap
        self.routing = routing
        self.router: nn.Module = Router(width, experts, routing, self.links.nodes)
        share = experts // self.links.size
        self.experts = Experts(
            width, hidden, share, first=share * self.links.position, mean_of=self.links.size
        )
        self.experts.different_on = self.links.ranks
        self.shared = shared
        # Not a buffer: DistributedDataParallel copies rank 0's buffers to the other ranks.
        self.load = torch.zeros(experts, dtype=torch.int64)
        """Tokens of this rank for each expert, since the last `haiscale.moe.balance`."""
        self.balance_loss: Tensor | None = None
        """Of the last forward pass, where the routing balances by loss: 1 if balanced."""
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in, tokens out: any shape whose last dimension is the width."""
        choice, pairs, failure = self._choose(x)
        census = self._census(x.numel() // self.width, pairs, failure)
        assert choice is not None
        assert pairs is not None
        self._note(choice, census)
        tokens = x.reshape(-1, self.width)
        shared: list[Tensor] = []

        def meanwhile() -> None:
            if self.shared is not None:
                shared.append(self.shared(tokens))

        try:
            routed = route(
                self.name, self.links, census, tokens, pairs, self.experts,
                meanwhile if self.overlap else lambda: None,
            )  # fmt: skip
            if not self.overlap:
                meanwhile()
        except MoEError:
            raise
        except Exception as error:
            if not ends_recomputation(error):
                self.links.failed_here(self.name, error)
            raise
        return sum(shared, routed).view_as(x)

    def _check_shape(self, x: Tensor) -> None:
        if x.dim() < 1 or x.shape[-1] != self.width:
            raise ValueError(
                f"layer {self.name!r}: input of shape {tuple(x.shape)}: expected {self.width} as "
                "the last dimension"
            )

    def _choose(self, x: Tensor) -> tuple[Choice | None, Pairs | None, Exception | None]:
        """The router's choice and its pairs, or why there are none."""
        try:
            self._check_shape(x)
            tokens = x.reshape(-1, self.width)
            choice: Choice = self.router(tokens)
            if not bool(torch.isfinite(choice.probabilities).all()):
                return None, None, _NotFinite()
            choice.check(self.count, tokens.shape[0])
        except Exception as error:  # noqa: BLE001  (raised once the other ranks know)
            return None, None, error
        kept = choice.experts >= 0
        row = torch.arange(tokens.shape[0], device=x.device).unsqueeze(1).expand_as(kept)
        return choice, Pairs(row[kept], choice.experts[kept], choice.weights[kept]), None

    def _census(self, tokens: int, pairs: Pairs | None, failure: Exception | None) -> Census:
        """Counts of all ranks; raises on all ranks if one has a failure."""
        links, name, state = self.links, self.name, counts.FINE
        if failure is not None:
            state = counts.NON_FINITE if isinstance(failure, _NotFinite) else counts.FAILED
        self._calls += 1
        try:
            if self._calls == 1:
                counts.check_same_layer(links, name, self._description())
            head = counts.Head(name, self.index, self._calls, state, tokens)
            return counts.take(links, head, pairs, self.count)
        except NonFiniteError:
            raise
        except MoEError:
            if failure is not None:
                raise failure from None
            raise
        except Exception as error:
            raise links.failed(name, "counts", error, links.group) from error

    def _description(self) -> dict[str, int]:
        routing = self.routing
        return {
            "the number of the layer": self.index,
            "the number of experts": self.count,
            "width": self.width,
            "hidden": self.experts.gate.shape[2],
            "top_k": routing.top_k,
            "bits of a parameter": self.experts.gate.dtype.itemsize * 8,
            "1000 x capacity_factor": int(1000 * (routing.capacity_factor or 0)),
            "nodes_per_token": routing.nodes_per_token or 0,
            "balance": (None, "bias", "loss").index(routing.balance),
        }

    def _note(self, choice: Choice, census: Census) -> None:
        """Counts for the balance and of traffic."""
        links, experts = self.links, self.count
        # A pass that is computed again for its gradients has been counted.
        if self.training and not in_backward():
            self.load += census.load[links.position]
        if self.routing.balance == "loss":
            load = census.load.sum(0).to(choice.probabilities)
            share = load / load.sum().clamp_min(1)
            mean = choice.probabilities.sum(0) / max(1, choice.probabilities.shape[0])
            self.balance_loss = experts * (share * mean).sum()
        own = census.load[links.position].reshape(links.nodes, -1).sum(1)
        copies = census.to_node[links.position]
        links.counters.tokens += int(census.tokens[links.position])
        links.counters.pairs += int(own.sum() - own[links.node])
        links.counters.copies += int(copies.sum() - copies[links.node])


class _NotFinite(Exception):  # noqa: N818  (never raised)
    """The scores are not finite."""

"""A rank of the measurement of experts: one layer over each backend, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from haiscale import moe
from haiscale.placement import Nodes
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from bench.training.rank import serve, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bench.training.rank import Spec

__all__ = ["Layer", "rank_main"]


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of the layer."""

    width: int
    hidden: int
    experts: int
    top_k: int
    tokens: int
    """Of each rank."""
    nodes: int
    ranks_per_node: int


def rank_main(rank: int, size: int, orders: str, store: str, spec: Spec) -> None:
    """A rank: commands are `VARIANT 1 0 COUNT CHECK`."""

    def runner(groups: dict[str, dist.ProcessGroup]) -> _Runner:
        # A rank loads this file under another name: `Layer` is another class there.
        sizes: Any = spec.model
        return _Runner(rank, sizes, groups)

    serve(rank, size, orders, store, spec, runner)


class _Runner:
    """The variants `haiscale+BACKEND` and `all-to-all+BACKEND`, with the same parameters."""

    def __init__(self, rank: int, sizes: Layer, groups: dict[str, dist.ProcessGroup]) -> None:
        names = tuple(f"n{node}" for node in range(sizes.nodes))
        nodes = Nodes(names, ("A",) * sizes.nodes, sizes.ranks_per_node)
        generator = torch.Generator().manual_seed(100 + rank)
        self._tokens = torch.randn(sizes.tokens, sizes.width, generator=generator)
        self._layers: dict[str, nn.Module] = {}
        for backend, group in groups.items():
            links = moe.connect(group=group, nodes=nodes)
            torch.manual_seed(1)
            routing = moe.Routing(sizes.top_k)
            shared = nn.Sequential(
                nn.Linear(sizes.width, sizes.hidden),
                nn.SiLU(),
                nn.Linear(sizes.hidden, sizes.width),
            )
            layer = moe.MoE(
                sizes.width, sizes.hidden, sizes.experts, routing, links=links, shared=shared
            )
            self._layers[f"haiscale+{backend}"] = layer
            self._layers[f"all-to-all+{backend}"] = AllToAll(layer, group)

    def run(self, order: Sequence[str]) -> str:
        """Runs one command and returns its answer."""
        name, _, _, count, check = order
        layer = self._layers[name]
        if int(check) and not self._is_right(layer):
            return "wrong outputs or gradients"
        return timed(lambda steps: self._steps(layer, steps), int(count))

    def _steps(self, layer: nn.Module, count: int) -> Tensor:
        for _ in range(count):
            tokens = self._tokens.clone().requires_grad_()
            layer.zero_grad()
            layer(tokens).square().mean().backward()
        assert tokens.grad is not None
        return tokens.grad

    def _is_right(self, layer: nn.Module) -> bool:
        found, expected = (self._steps(each, 1) for each in (layer, self._first))
        error = ((found - expected).norm() / expected.norm()).reshape(1)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        return bool(error < 1e-4)

    @property
    def _first(self) -> nn.Module:
        return next(iter(self._layers.values()))


class AllToAll(nn.Module):
    """The same layer with one copy for each expert and one all-to-all over all ranks each way."""

    def __init__(self, layer: moe.MoE, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layer, self._group = layer, group

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens in, tokens out."""
        layer, ranks = self.layer, self._group.size()
        choice = layer.router(tokens)
        expert, weight = choice.experts.flatten(), choice.weights.flatten()
        order = expert.argsort(stable=True)
        row = order // choice.experts.shape[1]
        sent = torch.bincount(expert, minlength=layer.count)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        to, arrived = (each.view(ranks, -1).sum(1).tolist() for each in (sent, received))
        exchange: Any = all_to_all_single_autograd
        rows = torch.ops._c10d_functional.wait_tensor(
            exchange(tokens[row], arrived, to, self._group)
        )
        # From each rank the rows of each expert, to the rows of each expert from each rank.
        own = torch.arange(received.numel()) % (layer.count // ranks)
        by_expert = own.repeat_interleave(received).argsort(stable=True)
        counts = received.view(ranks, -1).sum(0).tolist()
        results = layer.experts(rows[by_expert], counts)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(by_expert.numel())
        results = torch.ops._c10d_functional.wait_tensor(
            exchange(results[back], to, arrived, self._group)
        )
        routed = torch.zeros_like(tokens).index_add(0, row, results * weight[order, None])
        assert layer.shared is not None
        output: Tensor = routed + layer.shared(tokens)
        return output

"""A rank of the measurement of tensor parallelism: steps of a small Llama over each backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from haiscale import tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from bench.training.figures import ALONE
from bench.training.rank import serve, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bench.training.rank import Spec

__all__ = ["Shape", "rank_main"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and of its input."""

    width: int
    layers: int = 2
    batch: int = 2
    length: int = 64
    vocabulary: int = 512


def rank_main(rank: int, size: int, orders: str, store: str, spec: Spec) -> None:
    """A rank: commands are `VARIANT WIDTH 0 COUNT CHECK`; VARIANT is a backend or `alone`."""
    serve(rank, size, orders, store, spec, _Runner)


class _Runner:
    """A model of each variant and width; created at its first command."""

    def __init__(self, groups: dict[str, dist.ProcessGroup]) -> None:
        self._groups = groups
        self._models: dict[tuple[str, int], tuple[Shape, nn.Module, torch.optim.Optimizer]] = {}

    def run(self, order: Sequence[str]) -> str:
        """Runs one command and returns its answer."""
        name, width, _, count, check = order
        if (name, int(width)) not in self._models:
            self._models[name, int(width)] = self._created(name, Shape(int(width)))
        shape, model, optimizer = self._models[name, int(width)]
        if name == ALONE and dist.get_rank() > 0:
            return timed(lambda _: None, int(count))  # the other processor is not used
        if int(check) and not self._is_right(shape, model):
            return "wrong loss"
        return timed(lambda steps: _steps(shape, model, optimizer, steps), int(count))

    def _created(self, name: str, shape: Shape) -> tuple[Shape, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model: nn.Module = Llama(shape)
        if name != ALONE:
            group = self._groups[name.partition(":")[0]]
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
            sequence = name.endswith(":sequence")
            tensor.parallelize(model, mesh, head_width=shape.width // 4, sequence=sequence)
        return shape, model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def _is_right(self, shape: Shape, model: nn.Module) -> bool:
        torch.manual_seed(1)
        expected = _loss(shape, Llama(shape))
        return abs(float(_loss(shape, model) - expected)) < 1e-4


def _steps(shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        _loss(shape, model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _loss(shape: Shape, model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=generator)
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Llama(nn.Module):
    """Meta's names; attention with four heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of tokens."""
        x: Tensor = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(width), _Feed(width, 4 * width)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._head = width // 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            w(x).view(batch, length, -1, self._head).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        return result


class _Feed(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result

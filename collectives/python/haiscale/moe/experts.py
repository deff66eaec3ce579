"""Experts of one rank: feed-forward networks (SwiGLU) whose weights are stacked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Experts"]


class Experts(nn.Module):
    """The experts `first` to `first + count - 1` of a layer.

    First values depend on the default generator and on the expert's number, so they are the same on
    any number of ranks if all ranks have set the same seed. `mean_of` ranks contribute tokens:
    gradients are divided by it, so they are those of the mean of the ranks' losses.
    """

    def __init__(
        self, width: int, hidden: int, count: int, *, first: int = 0, mean_of: int = 1
    ) -> None:
        super().__init__()
        self.first, self.mean_of = first, mean_of
        self.different_on: tuple[int, ...] = ()
        """Ranks of the layer, each with other experts: haiscale.ddp refuses to average them."""
        self.gate = nn.Parameter(torch.empty(count, width, hidden))
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        seed = int(torch.randint(1 << 40, ()))
        with torch.no_grad():
            for index in range(count):
                generator = torch.Generator().manual_seed(seed + first + index)
                for weight in (self.gate, self.up, self.down):
                    bound = 1 / math.sqrt(weight.shape[1])
                    weight[index].uniform_(-bound, bound, generator=generator)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows in, rows out: the first `counts[0]` of the first expert, and so on.

        Every expert takes part, also with 0 rows: its gradient is then zero, not None.
        """
        weights = [_Mean.apply(w, self.mean_of) for w in (self.gate, self.up, self.down)]
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
            return _grouped(rows, weights, ends)
        unbound = zip(*(weight.unbind(0) for weight in weights), strict=True)
        parts = zip(torch.split(rows, [*counts]), unbound, strict=True)
        return torch.cat([(functional.silu(x @ g) * (x @ u)) @ d for x, (g, u, d) in parts])

    def extra_repr(self) -> str:
        """Sizes, for people."""
        count, width, hidden = self.gate.shape
        return f"width={width}, hidden={hidden}, experts={self.first}..{self.first + count - 1}"


def _grouped(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """The same as one kernel for each matrix, where torch has it (bfloat16 on CUDA)."""
    gate, up, down = weights
    inner = functional.silu(functional.grouped_mm(rows, gate, offs=ends))
    inner = inner * functional.grouped_mm(rows, up, offs=ends)
    return functional.grouped_mm(inner, down, offs=ends)


class _Mean(torch.autograd.Function):
    """The tensor itself; its gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int) -> Tensor:
        ctx.number = number
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.number == 1 else gradient / ctx.number, None

"""Exchanges of plain tensors between the ranks of a divided layer, with their gradients.

The backward pass of an exchange is its transpose: those of `shared` and `summed` are each other's
forward pass, as are those of `gathered` and `scattered` (Shoeybi et al., 2019; Korthikanti et al.,
2022). All ranks of the group call them in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gathered", "has_whole_gradients", "joined", "scattered", "shared", "summed"]


def shared(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor that is equal on all ranks, for divided matrices; the gradient is the ranks' sum."""
    result: Tensor = _Shared.apply(tensor, group)
    return result


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks; the gradient, equal on all ranks, is passed on."""
    result: Tensor = _Summed.apply(tensor, group)
    return result


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks along dimension 1; the gradient is this rank's part of the sum."""
    result: Tensor = _Gathered.apply(tensor, group)
    return result


def scattered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum, along dimension 1; the gradient has the parts of all ranks."""
    result: Tensor = _Scattered.apply(tensor, group)
    return result


def joined(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks along the last dimension; the gradient, equal on all, is divided."""
    result: Tensor = _Joined.apply(tensor, group)
    return result


def has_whole_gradients(tensor: Tensor) -> bool:
    """Whether partial gradients of a tensor are summed before they reach a parameter or a sum.

    A sum passes its gradient on as equal on all ranks, which a partial one is not.
    """
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or isinstance(node, _SUMS):
            continue
        if isinstance(node, _ENDS) or isinstance(getattr(node, "variable", None), nn.Parameter):
            return False
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
    return True


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(tensor, group, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter(gradient, ctx.group, 1), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(tensor, group, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.group, 1), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(tensor, group, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


_SUMS: Any = (_Shared._backward_cls, _Gathered._backward_cls)
"""Nodes of autograd's graph whose gradient is summed over the ranks."""
_ENDS: Any = (_Summed._backward_cls, _Scattered._backward_cls)
"""Nodes whose gradient must be equal on all ranks, or have all of their positions."""


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A new tensor: autograd may give a gradient to others, too."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(part: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    # Along dimension 0: the only form that Gloo has.
    parts = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group)
    return torch.cat(parts.view(group.size(), *part.shape).unbind(0), dimension)


def _scatter(tensor: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    parts = tensor.chunk(group.size(), dimension)
    part = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(part, torch.cat(parts), group=group)
    return part

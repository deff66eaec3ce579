"""Clipping of gradients by one norm over all parallel axes.

    norm = clip_grad_norm(model, 1.0, pipeline=meshes.dense.get_group("pp"))

The norm is that of the whole model, whatever ranks hold its parts: parameters of all stages, all
shards of DTensors over shard and tp, and the experts of all ranks. Replicas (dp) have equal
gradients and are counted once.
Squares are added in double precision, and the sum of all parameters' squares is correctly rounded,
so its bits depend neither on timing nor on the order in which ranks are added.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from haiscale.moe.layer import MoE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

__all__ = ["clip_grad_norm", "grad_norm"]


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    pipeline: dist.ProcessGroup | None = None,
    copies: Collection[str] = (),
    error_if_nonfinite: bool = False,
) -> float:
    """Scales all gradients so that their norm is at most `max_norm`; returns the norm before that.

    Every rank of `pipeline`, of the meshes of DTensors and of the links of experts calls it.

    Args:
        model: The part of the model that this rank has.
        max_norm: Largest norm, above 0.
        pipeline: Ranks with other parameters of the model (pp).
        copies: Names of parameters that another rank counts, such as tied ones.
        error_if_nonfinite: Raise RuntimeError, on every rank, instead of scaling by NaN or 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: expected a number above 0")
    norm = grad_norm(model, pipeline=pipeline, copies=copies)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}: no gradient was changed")
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # As torch's: no branch on the norm, so that equal norms give equal bits.
    factor = min(1.0, max_norm / (norm + 1e-6)) if not math.isnan(norm) else math.nan
    for gradient in gradients:
        gradient.mul_(factor)
    return norm


@torch.no_grad()
def grad_norm(
    model: nn.Module,
    *,
    pipeline: dist.ProcessGroup | None = None,
    copies: Collection[str] = (),
) -> float:
    """The norm that `clip_grad_norm` uses; infinity or NaN if a gradient has such an element."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    squares: list[float] = []
    links = _links(model)
    divided: dict[tuple[Any, tuple[int, ...], Any], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or name in copies:
            continue
        axes: tuple[int, ...] = ()
        mesh = None
        if isinstance(gradient, DTensor):
            axes, mesh = _sharded_axes(name, gradient), gradient.device_mesh
            gradient = gradient.to_local()
        group = links.get(parameter)
        if axes or group is not None:
            divided.setdefault((mesh, axes, group), []).append(gradient)
        else:
            squares.append(_square(gradient))
    for (mesh, axes, group), gradients in divided.items():
        own = [_square(gradient) for gradient in gradients]
        for axis in axes:
            own = _gathered(own, mesh.get_group(axis), device)
        if group is not None:
            own = _gathered(own, group, device)
        squares += own
    if pipeline is not None:
        squares = _gathered(squares, pipeline, device)
    return math.sqrt(_sum(squares))


def _links(model: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup]:
    """The ranks that have the other experts, by the parameters of experts."""
    return {
        parameter: layer.links.group
        for layer in model.modules()
        if isinstance(layer, MoE) and layer.links.group is not None
        for parameter in layer.experts.parameters()
    }


def _square(gradient: Tensor) -> float:
    norm: float = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    return norm * norm


def _sum(squares: Sequence[float]) -> float:
    if not all(map(math.isfinite, squares)):
        return sum(squares)
    return math.fsum(squares)


def _sharded_axes(name: str, gradient: DTensor) -> tuple[int, ...]:
    for placement in gradient.placements:
        if placement.is_partial():
            raise TypeError(f"the gradient of {name!r} is {placement}: reduce it before clipping")
    # Also torch's private placement of a dimension that two axes divide.
    return tuple(i for i, each in enumerate(gradient.placements) if not each.is_replicate())


def _gathered(own: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The numbers of all ranks of a group, in the order of the ranks; their counts may differ."""
    count = torch.tensor([len(own)], device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group)
    most = max(int(each.item()) for each in counts)
    padded = torch.zeros(most, dtype=torch.float64)
    padded[: len(own)] = torch.tensor(own, dtype=torch.float64)
    padded = padded.to(device)
    rows = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(rows, padded, group)
    return [value for row in rows for value in row.tolist()]

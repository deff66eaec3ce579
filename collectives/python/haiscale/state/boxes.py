"""Names of a model's tensors in the whole model, and the part of each that this rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from haiscale.ddp.module import DistributedDataParallel
from haiscale.internals.checkpoint import part_of
from haiscale.moe.layer import MoE
from haiscale.pipeline.module import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

__all__ = ["Box", "Named", "named_boxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor of the whole job, on this rank; several ranks may have the same part."""

    tensor: Tensor
    """The values of the part, without gradients."""
    shape: torch.Size
    """Of the whole tensor."""
    offsets: torch.Size
    """Where the part starts in the whole tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return self.tensor.shape == self.shape

    def checkpointable(self) -> Tensor:
        """The values with the fields of torch's `CheckpointableTensor`, for its planners."""
        result: Any = self.tensor.view_as(self.tensor)
        is_there = self.is_whole or self.tensor.numel() > 0  # there may be fewer rows than ranks
        result.global_shape = tuple(self.shape)
        result.global_offsets = (tuple(self.offsets),) * is_there
        result.local_offsets = ((0,) * self.tensor.dim(),) * is_there
        result.local_sizes = (tuple(self.tensor.shape),) * is_there
        tensor: Tensor = result
        return tensor


class Named:
    """The parameters and persistent buffers of a rank's part of a model."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        """By name in the whole model; of several names of one tensor the first in the alphabet."""
        self.names: dict[int, str] = {}
        """By identity of the parameter or buffer."""
        self.buffers: set[str] = set()
        """Names of the buffers: replicas may have other values, as of running means."""


def named_boxes(model: nn.Module | Pipeline) -> Named:
    """The boxes of a rank; steps in flight are made first.

    Args:
        model: A module on one rank, replicas, shards, or with divided matrices; or a pipeline.

    Raises:
        TypeError: The state dict has something else than parameters and buffers.
    """
    ties: Iterable[tuple[str, ...]] = ()
    if isinstance(model, Pipeline):
        module, ties = model.module, model.ties
    elif isinstance(model, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
        module = model.module
    else:
        module = model
    first_names = {name: min(names) for names in ties for name in names}
    experts = _experts(module)
    known = {id(each) for each in (*module.parameters(), *module.buffers())}
    tensors: dict[int, tuple[Tensor, list[str]]] = {}
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name!r} in the state dict of the model is a {type(value).__name__}: expected a "
                "tensor"
            )
        if id(value) not in known:
            raise TypeError(
                f"{name!r} in the state dict of the model is neither a parameter nor a buffer: its "
                "module computes it, and a load could not set it"
            )
        names = tensors.setdefault(id(value), (value, []))[1]
        names.append(first_names.get(name, name))
    result = Named()
    for key, (value, names) in tensors.items():
        name = min(names)
        result.names[key] = name
        result.boxes[name] = _box(value, experts.get(key))
        if not isinstance(value, nn.Parameter):
            result.buffers.add(name)
    return result


def _experts(module: nn.Module) -> dict[int, tuple[int, int]]:
    """Parameters of experts by identity: the first expert of this rank, and their number."""
    return {
        id(parameter): (layer.experts.first, layer.count)
        for layer in module.modules()
        if isinstance(layer, MoE)
        for parameter in layer.experts.parameters()
    }


def _box(value: Tensor, experts: tuple[int, int] | None) -> Box:
    if isinstance(value, DTensor):
        local, (offsets, sizes) = value.to_local().detach(), part_of(value)
        if local.shape != sizes:
            raise TypeError(
                f"a DTensor with the placements {value.placements} has a part of shape "
                f"{tuple(local.shape)}, expected {tuple(sizes)}: reduce it first"
            )
        box = Box(local, value.shape, offsets)
    else:
        box = Box(value.detach(), value.shape, torch.Size([0] * value.dim()))
    if experts is None:
        return box
    first, count = experts
    return Box(
        box.tensor,
        torch.Size([count, *box.shape[1:]]),
        torch.Size([first + box.offsets[0], *box.offsets[1:]]),
    )

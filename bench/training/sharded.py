"""Variants that shard: torch's FSDP2 over each backend, and haiscale.fsdp."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["MEMORY", "PREFIX", "WIRE", "Traffic", "finish", "memory_bytes", "shard", "whole"]

PREFIX: Final = "fsdp:"
"""Of variants: fsdp:haiscale, fsdp:gloo and fsdp:hfreduce."""
WIRE: Final = "sharded-wire:"
"""Prefix of a backend: gathers and scatters of a step without computation."""
MEMORY: Final = "memory:"
"""Prefix of a variant: bytes instead of seconds."""
OURS: Final = f"{PREFIX}haiscale"


def parts(module: nn.Module) -> list[nn.Module]:
    """Modules that are gathered by themselves: layers, and what is before and behind them."""
    blocks = getattr(module, "blocks", None)
    if blocks is None:
        return list(module.children())
    return [*blocks, *(each for name, each in module.named_children() if name != "blocks")]


def shard(module: nn.Module, variant: str, groups: dict[str, dist.ProcessGroup]) -> None:
    """Shards each part of a model over all ranks."""
    backend = variant.removeprefix(PREFIX)
    group = groups["hfreduce" if variant == OURS else backend]
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    ours: Any = importlib.import_module("haiscale.fsdp") if variant == OURS else None
    function = fully_shard if ours is None else ours.fully_shard
    for part in [*parts(module), module]:
        function(part, mesh=mesh)


def finish(module: nn.Module, variant: str, optimizer: Optimizer) -> Callable[[], object]:
    """Lets steps overlap; returns what completes the last one."""
    if variant != OURS:
        return lambda: None
    ours: Any = importlib.import_module("haiscale.fsdp")
    synchronize: Callable[[], object] = ours.overlap(module, optimizer).synchronize
    return synchronize


def whole(tensor: Tensor) -> Tensor:
    """All shards of a tensor."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def memory_bytes(module: nn.Module, optimizer: Optimizer, step: Callable[[], object]) -> int:
    """Largest sum of parameters, gradients and states during a step, seen as layers start and end.

    Whole parameters count while a module has them, in addition to the shards; buffers of
    collectives do not count.
    """
    shards = list(dict.fromkeys(nn.Module.parameters(module)))
    largest = 0

    def see(*_: object) -> None:
        nonlocal largest
        now = list(dict.fromkeys(nn.Module.parameters(module)))
        gathered = [p for p in now if not any(p is s for s in shards)]
        kept = [
            *shards,
            *(p.grad for p in [*shards, *gathered] if p.grad is not None),
            *(v for state in optimizer.state.values() for v in state.values()),
        ]
        sizes = sum(_bytes(each) for each in [*kept, *gathered])
        largest = max(largest, sizes)

    handles: list[Any] = []
    for part in parts(module):
        handles += [part.register_forward_pre_hook(see), part.register_forward_hook(see)]
        handles.append(part.register_full_backward_hook(see))
    try:
        step()
        see()
    finally:
        for handle in handles:
            handle.remove()
    return largest


def _bytes(value: object) -> int:
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.nbytes if isinstance(value, torch.Tensor) else 0


class Traffic:
    """Gathers and scatters of a step of FSDP2, without computation."""

    def __init__(self, module: nn.Module, name: str, groups: dict[str, dist.ProcessGroup]) -> None:
        self._group = groups[name.removeprefix(WIRE)]
        ranks = self._group.size()
        self._shards = [
            torch.zeros(-(-sum(p.numel() for p in part.parameters()) // ranks))
            for part in parts(module)
        ]
        self._whole = [torch.zeros(shard.numel() * ranks) for shard in self._shards]

    def steps(self, count: int) -> None:
        """Each part is gathered forward, and gathered and scattered backward, except the last."""
        for _ in range(count):
            works = [self._gather(part) for part in range(len(self._shards))]
            for part in reversed(range(len(self._shards))):
                if part < len(self._shards) - 1:
                    works.append(self._gather(part))
                works.append(self._scatter(part))
            for work in works:
                work.wait()

    def _gather(self, part: int) -> dist.Work:
        work = dist.all_gather_into_tensor(
            self._whole[part], self._shards[part], self._group, async_op=True
        )
        assert work is not None
        return work

    def _scatter(self, part: int) -> dist.Work:
        work = dist.reduce_scatter_tensor(
            self._shards[part], self._whole[part], group=self._group, async_op=True
        )
        assert work is not None
        return work

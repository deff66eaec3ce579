"""Process groups of the buckets: priorities and memory where the backend is HFReduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import hfreduce.torch
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hfreduce._native import Communicator

__all__ = ["abort", "allocate", "allreduce", "prioritized"]

LEVELS: Final = ("low", "normal", "high")
"""Of the buckets in the order of their start: the next forward pass needs the last ones first."""


def _communicator(group: dist.ProcessGroup) -> Communicator | None:
    try:
        return hfreduce.torch.communicator(group)
    except TypeError:
        return None


def prioritized(
    group: dist.ProcessGroup, sizes: Sequence[int], *, levels: bool | None
) -> list[dist.ProcessGroup]:
    """A group for each bucket, in the order of their start; a third of the bytes for each level.

    Without levels the first layers' gradients queue behind all others', and the next forward pass
    waits for all: the step is as long as with a barrier. Three levels of 12 equal layers bring it
    from 4.17 to 3.50, one level for each layer to 3.25 (forward 1, backward 2, wire 3). By default
    there are levels if gradients leave the node and there are three buckets or more.
    """
    communicator = _communicator(group)
    if communicator is None:
        return [group] * len(sizes)
    if levels is None:
        nodes: Any = communicator.plan()["nodes"]
        levels = len(nodes) > 1
    if not levels or len(sizes) < len(LEVELS):
        return [group] * len(sizes)
    groups = [_sibling(group, level) for level in LEVELS]
    total, before = sum(sizes), 0
    chosen = []
    for size in sizes:
        middle = before + size / 2
        chosen.append(groups[min(int(len(LEVELS) * middle / total), len(LEVELS) - 1)])
        before += size
    return chosen


def _sibling(group: dist.ProcessGroup, level: Any) -> dist.ProcessGroup:
    backend: Any = group._get_backend(torch.device("cpu"))
    made: Any = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=backend.options._timeout,
        backend=hfreduce.torch.NAME,
        pg_options=hfreduce.torch.Options(priority=level),
        use_local_synchronization=True,
    )
    sibling: dist.ProcessGroup = made
    return sibling


def allocate(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeroed memory for a bucket: registered if the group's ranks can reduce it in place.

    Each bucket is a block: HFReduce writes results in place from a page's start to a block's end.
    """
    if device.type == "cpu" and _communicator(group) is not None:
        return hfreduce.torch.empty(numel, dtype=dtype, group=group)
    return torch.zeros(numel, dtype=dtype, device=device)


def allreduce(buffer: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to average a buffer in place."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        # Gloo has no average; torch's DistributedDataParallel multiplies first, too.
        buffer.mul_(1.0 / group.size())
        op = dist.ReduceOp.SUM
    else:
        op = dist.ReduceOp.AVG
    work = dist.all_reduce(buffer, op, group, async_op=True)
    assert work is not None, "this rank is in the group"
    return work


def abort(groups: set[dist.ProcessGroup], reason: str) -> None:
    """Ends the waits of the other ranks now instead of at their deadline, if the backend can."""
    for group in groups:
        communicator = _communicator(group)
        if communicator is not None:
            communicator.abort(reason)

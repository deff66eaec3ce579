"""Allreduce of GPUs that are joined in pairs by NVLink.

The paper's second variant: a pair adds first, so that each GPU brings half a vector to the CPU::

    whole ──reduce-scatter in the pair──▶ half ──HFReduce over all pairs──▶ half
    half ──all-gather in the pair──▶ whole

A copy engine cannot add, so NCCL's kernels reduce inside a pair, over NVLink; HFReduce runs no
kernels. Half the bytes cross PCIe, and half as many cross the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

__all__ = ["Pairs"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The groups of one rank: its pair, and all ranks that contribute the same half."""

    pair: dist.ProcessGroup
    halves: dist.ProcessGroup

    @classmethod
    def join(
        cls,
        pairs: Sequence[tuple[int, int]],
        *,
        pair_backend: str = "nccl",
        half_backend: str = "hfreduce",
        timeout: timedelta | None = None,
    ) -> Pairs:
        """Creates the groups. All ranks pass the same list, which contains every rank once."""
        ranks = sorted(rank for pair in pairs for rank in pair)
        if ranks != list(range(dist.get_world_size())):
            raise ValueError(
                f"invalid pairs {list(pairs)}: each of the {dist.get_world_size()} ranks must be "
                "in exactly one pair"
            )
        own = dist.get_rank()
        # torch requires that all ranks create all groups in the same order.
        subgroups = [
            dist.new_group(list(pair), timeout=timeout, backend=pair_backend) for pair in pairs
        ]
        columns = [
            dist.new_group([pair[half] for pair in pairs], timeout=timeout, backend=half_backend)
            for half in range(2)
        ]
        at = next(index for index, pair in enumerate(pairs) if own in pair)
        pair, halves = subgroups[at], columns[pairs[at].index(own)]
        if not (isinstance(pair, dist.ProcessGroup) and isinstance(halves, dist.ProcessGroup)):
            raise TypeError(f"rank {own} is not a member of the groups of its pair")  # torch's -100
        return cls(pair, halves)

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Allreduce in place; sums, minima, maxima and products."""
        if op == dist.ReduceOp.AVG:
            raise ValueError("AVG is not supported for pairs: use SUM and divide by the ranks")
        if not tensor.is_contiguous():
            raise ValueError(
                "tensor is not contiguous: reduce tensor.contiguous() and copy the result back"
            )
        flat = tensor.detach().view(-1)
        odd = flat.numel() % 2
        whole = functional.pad(flat, (0, odd)) if odd else flat
        half = whole.new_empty(whole.numel() // 2)
        dist.reduce_scatter_tensor(half, whole, op=op, group=self.pair)
        dist.all_reduce(half, op=op, group=self.halves)
        dist.all_gather_into_tensor(whole, half, group=self.pair)
        if odd:
            flat.copy_(whole[:-1])

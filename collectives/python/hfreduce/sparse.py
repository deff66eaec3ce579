"""Sums of sparse tensors, as embeddings have for gradients: everybody's entries to everybody.

Each rank adds them in the order of the ranks, so all have the same bits. Entries travel padded to
the longest rank's, which is what one allgather can take.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import torch

from hfreduce import _native, tensors

__all__ = ["Gathering", "allreduce"]


class Gathering(Protocol):
    """The part of the backend that a sparse allreduce uses."""

    def size(self) -> int:
        """Number of ranks."""

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Gathers the tensors of all ranks in `output`; returns the operation's work."""


def allreduce(backend: Gathering, tensor: torch.Tensor, opts: Any) -> None:
    """In place; returns when done. Raises `ValueError` on all ranks if their shapes differ."""
    if tensors.operation_code(opts.reduceOp) != _native.SUM:
        raise ValueError(
            f"allreduce of a sparse tensor: {opts.reduceOp.op} is not known, only SUM is; "
            "call .to_dense()"
        )
    terms = SimpleNamespace(timeout=opts.timeout, asyncOp=False)

    def everybody(own: torch.Tensor) -> torch.Tensor:
        """(ranks, *own.shape): every rank's."""
        whole = own.new_empty((backend.size(), *own.shape))
        backend.all_gather_single(whole, own.contiguous(), terms).wait()
        return whole

    with torch.no_grad():
        own = tensor.coalesce()
        counts = _entries(everybody, own)
        longest = max(counts)
        values = everybody(_padded(own.values(), longest))
        # Columns first: an entry's place is a row.
        places = everybody(_padded(own.indices().t(), longest))
        kept = [slice(count) for count in counts]
        summed = torch.sparse_coo_tensor(
            torch.cat([each[few] for each, few in zip(places, kept, strict=True)]).t(),
            torch.cat([each[few] for each, few in zip(values, kept, strict=True)]),
            size=own.shape,
        )
        tensor.copy_(summed.coalesce())


def _entries(everybody: Any, own: torch.Tensor) -> list[int]:
    """How many entries each rank has; their shapes must be one."""
    shape = [own.sparse_dim(), *own.shape]
    # Only so much of a shape is told: the number of dimensions first, so all lengths are equal.
    dims = everybody(torch.tensor([len(shape), own.values().shape[0]]))
    if len(set(dims[:, 0].tolist())) == 1:
        shapes = everybody(torch.tensor(shape))
        wrong = (shapes != shapes[0]).any(1).nonzero().flatten().tolist()
    else:
        shapes, wrong = dims[:, :1], (dims[:, 0] != dims[0, 0]).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"allreduce of sparse tensors: rank {wrong[0]} has another shape than rank 0 (number "
            f"of sparse dimensions, then sizes: {shapes[wrong[0]].tolist()} and "
            f"{shapes[0].tolist()}): all ranks' must be equal"
        )
    return [int(count) for count in dims[:, 1]]


def _padded(entries: torch.Tensor, length: int) -> torch.Tensor:
    whole = entries.new_zeros((length, *entries.shape[1:]))
    whole[: len(entries)] = entries
    return whole

"""Allreduce of sparse tensors, for example of embedding gradients, as an allgather of entries.

Each rank adds the entries in rank order, so all ranks get the same bits. Entries are padded to the
largest number of any rank, since an allgather needs equal sizes.
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
    """Reduces in place, synchronously. Raises `ValueError` on all ranks if shapes differ."""
    if tensors.operation_code(opts.reduceOp) != _native.SUM:
        raise ValueError(
            f"allreduce of a sparse tensor: {opts.reduceOp.op} is not supported, only SUM: "
            "call .to_dense()"
        )
    options = SimpleNamespace(timeout=opts.timeout, asyncOp=False)

    def gathered(own: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks: (ranks, *own.shape)."""
        whole = own.new_empty((backend.size(), *own.shape))
        backend.all_gather_single(whole, own.contiguous(), options).wait()
        return whole

    with torch.no_grad():
        own = tensor.coalesce()
        counts = _entries(gathered, own)
        longest = max(counts)
        values = gathered(_padded(own.values(), longest))
        # Transposed, so that each row is the index of one entry.
        places = gathered(_padded(own.indices().t(), longest))
        slices = [slice(count) for count in counts]
        summed = torch.sparse_coo_tensor(
            torch.cat([each[few] for each, few in zip(places, slices, strict=True)]).t(),
            torch.cat([each[few] for each, few in zip(values, slices, strict=True)]),
            size=own.shape,
        )
        tensor.copy_(summed.coalesce())


def _entries(gathered: Any, own: torch.Tensor) -> list[int]:
    """Number of entries of each rank. Raises `ValueError` if shapes differ."""
    shape = [own.sparse_dim(), *own.shape]
    # The number of dimensions is gathered first: an allgather of shapes needs equal lengths.
    dims = gathered(torch.tensor([len(shape), own.values().shape[0]]))
    if len(set(dims[:, 0].tolist())) == 1:
        shapes = gathered(torch.tensor(shape))
        wrong = (shapes != shapes[0]).any(1).nonzero().flatten().tolist()
    else:
        shapes, wrong = dims[:, :1], (dims[:, 0] != dims[0, 0]).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"allreduce of sparse tensors: rank {wrong[0]} has a different shape from rank 0 "
            f"(number of sparse dimensions, then sizes: {shapes[wrong[0]].tolist()} and "
            f"{shapes[0].tolist()}): pass tensors of equal shape"
        )
    return [int(count) for count in dims[:, 1]]


def _padded(entries: torch.Tensor, length: int) -> torch.Tensor:
    whole = entries.new_zeros((length, *entries.shape[1:]))
    whole[: len(entries)] = entries
    return whole

"""Agreement of the ranks on a model: its description and its first values."""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from haiscale.overlap.errors import ModelMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["broadcast", "check_replicas", "check_same_model", "describe"]

PIECE_BYTES: Final = 25 * 2**20
"""Of tensors that are broadcast as one."""


def check_replicas(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises ValueError for parameters of which the ranks of a group have different parts.

    Modules of haiscale.moe list the ranks with other values in the attribute `different_on`.
    """
    members = set(dist.get_process_group_ranks(group))
    for name, each in module.named_modules():
        different = sorted(members.intersection(getattr(each, "different_on", ())))
        if len(different) > 1:
            raise ValueError(
                f"{name or type(each).__name__}: the ranks {different} have different experts, "
                "and DistributedDataParallel would give them the same: call "
                "haiscale.moe.average_gradients after backward instead"
            )
    divided = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    if divided:
        raise ValueError(
            f"{divided[0]}: a DTensor, and DistributedDataParallel averages plain tensors: use "
            "haiscale.fsdp.fully_shard instead, also for replicas"
        )


def describe(module: nn.Module, settings: str) -> list[tuple[str, str]]:
    """Names and descriptions of everything that must be equal on all ranks."""
    entries = [("settings", settings)]
    entries += [(name, _kind(p, p.requires_grad)) for name, p in module.named_parameters()]
    entries += [(name, _kind(buffer, False)) for name, buffer in module.named_buffers()]
    return entries


def _kind(tensor: Tensor, is_trained: bool) -> str:  # noqa: FBT001  (private)
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{sizes} {str(tensor.dtype).removeprefix('torch.')}{' trained' * is_trained}"


def check_same_model(
    entries: Sequence[tuple[str, str]],
    group: dist.ProcessGroup,
    device: torch.device,
    across: dist.ProcessGroup | None = None,
) -> None:
    """Raises `ModelMismatchError` on every rank if a model differs from that of the first rank.

    Args:
        entries: What `describe` returns on this rank.
        group: Ranks that compare; of a mesh, those of one row.
        device: Where the groups communicate.
        across: Of a mesh, the ranks of a column: they learn of a difference in another row.
    """
    text = "\n".join(f"{name}\t{kind}" for name, kind in entries).encode()
    error = _difference(text, group, device, None)
    if across is not None:
        error = _difference(b"" if error else text, across, device, error)
    if error is not None:
        raise error


def _difference(
    text: bytes, group: dist.ProcessGroup, device: torch.device, known: ModelMismatchError | None
) -> ModelMismatchError | None:
    report = b"" if known is None else json.dumps(known.fields).encode()
    own = hashlib.sha256(text + report).digest()
    own += b"".join(len(each).to_bytes(8, "little") for each in (text, report))
    summaries = _gather(own, group, device)
    if len(set(summaries)) == 1:
        return known
    lengths = [
        [int.from_bytes(summary[at : at + 8], "little") for at in (32, 40)] for summary in summaries
    ]
    longest = max(sum(each) for each in lengths)
    gathered = _gather((text + report).ljust(longest), group, device)
    for (before, size), each in zip(lengths, gathered, strict=True):
        if size:
            return ModelMismatchError(*json.loads(each[before : before + size]))
    texts = [each[:size] for (size, _), each in zip(lengths, gathered, strict=True)]
    models = [[line.split("\t") for line in each.decode().split("\n")] for each in texts]
    rank = next(rank for rank, model in enumerate(models) if model != models[0])
    for found, expected in zip_longest(models[rank], models[0], fillvalue=["nothing", ""]):
        if found != expected:
            name = expected[0] if expected[0] != "nothing" else found[0]
            ranks = [dist.get_global_rank(group, each) for each in (rank, 0)]
            return ModelMismatchError(ranks[0], name, " ".join(found), " ".join(expected), ranks[1])
    return known


def _gather(own: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group)
    return [bytes(each.tolist()) for each in gathered]


@torch.no_grad()
def broadcast(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device | None = None
) -> None:
    """Copies tensors of rank 0 to the other ranks, small ones together.

    `device` is where the group communicates. Default: where the tensors are.
    """
    source = dist.get_global_rank(group, 0)
    for piece in _pieces(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in piece])
        flat = flat if device is None else flat.to(device)
        dist.broadcast(flat, source, group)
        parts = torch.split(flat, [tensor.numel() for tensor in piece])
        for tensor, part in zip(piece, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        piece = by_kind.setdefault((tensor.device, tensor.dtype), [])
        piece.append(tensor)
        if sum(each.nbytes for each in piece) >= PIECE_BYTES:
            yield by_kind.pop((tensor.device, tensor.dtype))
    yield from by_kind.values()

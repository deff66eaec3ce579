"""Agreement of the ranks on a model: its description and its first values."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from haiscale.ddp.errors import ModelMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["broadcast", "check_same_model"]

PIECE_BYTES: Final = 25 * 2**20
"""Of tensors that are broadcast as one."""


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
    entries: Sequence[tuple[str, str]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises the same `ModelMismatchError` on every rank if a model differs from rank 0's."""
    text = "\n".join(f"{name}\t{kind}" for name, kind in entries).encode()
    own = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    summaries = _gather(own, group, device)
    if len(set(summaries)) == 1:
        return
    longest = max(int.from_bytes(summary[-8:], "little") for summary in summaries)
    texts = _gather(text.ljust(longest, b"\n"), group, device)
    models = [[line.split("\t") for line in each.decode().split("\n") if line] for each in texts]
    rank = next(rank for rank, model in enumerate(models) if model != models[0])
    for found, expected in zip(
        [*models[rank], *[["nothing", ""]] * len(models[0])],
        [*models[0], *[["nothing", ""]] * len(models[rank])],
        strict=False,
    ):
        if found != expected:
            name = expected[0] if expected[0] != "nothing" else found[0]
            raise ModelMismatchError(rank, name, " ".join(found), " ".join(expected))


def _gather(own: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group)
    return [bytes(each.tolist()) for each in gathered]


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copies tensors of rank 0 to the other ranks, small ones together."""
    source = dist.get_global_rank(group, 0)
    for piece in _pieces(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in piece])
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

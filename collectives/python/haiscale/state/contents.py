"""A fingerprint of a checkpoint that does not depend on the layout that has saved it."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["digest", "load_planner"]

PIECE_BYTES: Final = 256 * 2**20
"""Of tensors that are read together."""


def load_planner() -> DefaultLoadPlanner:
    """Contents are flat: names are those of the checkpoint."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def digest(reader: StorageReader, checkpoint: str) -> str:
    """SHA-256 of names, types, shapes and bytes of everything in a checkpoint, in name order.

    One process reads all of it; equal digests mean equal bits of model, optimizer and position.
    """
    reader.reset(checkpoint)
    fingerprint = hashlib.sha256()
    for piece in _pieces(reader.read_metadata()):
        load(
            piece,
            storage_reader=reader,
            checkpoint_id=checkpoint,
            planner=load_planner(),
            no_dist=True,
        )
        for name, value in piece.items():
            if isinstance(value, torch.Tensor):
                fingerprint.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                fingerprint.update(ctypes.string_at(value.data_ptr(), value.nbytes))
            else:
                fingerprint.update(f"{name} {value!r}\n".encode())
    return fingerprint.hexdigest()


def _pieces(metadata: Metadata) -> Iterator[dict[str, Any]]:
    """Empty tensors of the whole shapes, some at a time."""
    piece: dict[str, Any] = {}
    used_bytes = 0
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        piece[name] = ""
        if isinstance(entry, TensorStorageMetadata):
            piece[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            used_bytes += piece[name].nbytes
        if used_bytes >= PIECE_BYTES:
            yield piece
            piece, used_bytes = {}, 0
    if piece:
        yield piece

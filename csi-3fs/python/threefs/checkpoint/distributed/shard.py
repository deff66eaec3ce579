"""Shard file of one rank: its items, one after another, written in whole chunks.

Items are copied into a buffer and written in pieces that start at multiples of 4 MiB, so that no
chunk of 3FS is written twice, whatever the sizes of the tensors.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import torch

from threefs.checkpoint.checksum import ALGORITHM, checksum
from threefs.checkpoint.distributed.index import BLOCK_BYTES, Item
from threefs.checkpoint.errors import CheckpointError
from threefs.checkpoint.files import BATCH_BYTES, REQUEST_BYTES

if TYPE_CHECKING:
    from threefs.checkpoint.files import Files

__all__ = ["ShardWriter"]

ALIGN_BYTES = 64
"""Items start at multiples of this, so that every dtype is aligned in memory after a read."""


class ShardWriter:
    """Appends items to one shard; an item that was added is durable after `close`."""

    def __init__(self, files: Files, folder: str, name: str) -> None:
        self._files = files
        self._path = f"{folder}/{name}"
        self._name = name
        self._buffer = memoryview(mmap.mmap(-1, BATCH_BYTES))
        self._written = 0
        self._filled = 0

    @property
    def length(self) -> int:
        """Bytes of the shard so far."""
        return self._written + self._filled

    def add_tensor(self, fqn: str, origin: list[int], tensor: torch.Tensor) -> Item:
        """Append a tensor on any device, with any strides."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(f"`{fqn}` is a {tensor.layout} tensor: give a dense one")
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # A tensor of one element counts as contiguous with any stride; its bytes do not.
        data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        dtype = str(plain.dtype).removeprefix("torch.")
        return self._add(fqn, origin, data, dtype, list(plain.shape))

    def add_bytes(self, fqn: str, value: memoryview) -> Item:
        """Append an object's bytes."""
        data = torch.empty(0, dtype=torch.uint8)
        if value:
            data = torch.frombuffer(value, dtype=torch.uint8)
        return self._add(fqn, None, data, "", [len(value)])

    def _add(
        self, fqn: str, origin: list[int] | None, data: torch.Tensor, dtype: str, shape: list[int]
    ) -> Item:
        self._pad(-self.length % ALIGN_BYTES)
        offset, length = self.length, data.numel()
        checksums: list[int] = []
        for start in range(0, length, BLOCK_BYTES):
            end, crc = min(start + BLOCK_BYTES, length), 0
            while start < end:
                free = self._free()
                count = min(end - start, len(free))
                torch.frombuffer(free, dtype=torch.uint8, count=count).copy_(
                    data[start : start + count]
                )
                crc = checksum(ALGORITHM, free[:count], crc)
                self._filled += count
                start += count  # noqa: PLW2901  the block continues in the next buffer
            checksums.append(crc)
        return Item(fqn, origin, self._name, offset, length, dtype, shape, checksums)

    def _pad(self, count: int) -> None:
        while count:
            free = self._free()[:count]
            free[:] = bytes(len(free))
            self._filled += len(free)
            count -= len(free)

    def _free(self) -> memoryview:
        if self._filled == len(self._buffer):
            self._flush()
        return self._buffer[self._filled :]

    def _flush(self) -> None:
        batch: list[tuple[str, int, Any]] = [
            (
                self._path,
                self._written + at,
                self._buffer[at : min(at + REQUEST_BYTES, self._filled)],
            )
            for at in range(0, self._filled, REQUEST_BYTES)
        ]
        if batch:
            self._files.batch_write(batch)
        self._written += self._filled
        self._filled = 0

    def close(self) -> None:
        """Write the rest; then the whole shard is durable."""
        self._flush()

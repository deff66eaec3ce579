"""Reads of parts of items: byte ranges from boxes of tensors, checksums, copies into the targets.

A read covers whole blocks, because checksums do. Blocks that lie inside a contiguous target on the
CPU are read straight into it; all others are read into a buffer and copied from there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Protocol

import torch

from threefs.checkpoint.checksum import checksum
from threefs.checkpoint.errors import CheckpointDamagedError, CheckpointError
from threefs.checkpoint.files import REQUEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.checkpoint.distributed.index import Index, Item
    from threefs.checkpoint.files import Files

__all__ = ["BytesRead", "Read", "TensorRead", "read_all"]


@dataclass(frozen=True, slots=True)
class _Run:
    """Whole blocks of an item, from `start`, and the memory that they are read into."""

    start: int
    buffer: memoryview


class Read(Protocol):
    """One item, or a part of it, and what is done with it once it is verified."""

    item: Item
    length: int
    """Bytes that are asked for."""

    def runs(self, block_bytes: int) -> list[_Run]:
        """Allocate the memory and return what to read."""

    def finish(self) -> None:
        """Use the verified bytes."""


class BytesRead:
    """An object's bytes."""

    def __init__(self, item: Item, load: Callable[[bytearray], object]) -> None:
        self.item = item
        self.length = item.length
        self._load = load
        self._data = bytearray()

    def runs(self, block_bytes: int) -> list[_Run]:
        """Read all of it."""
        del block_bytes
        self._data = bytearray(self.item.length)
        return [_Run(0, memoryview(self._data))]

    def finish(self) -> None:
        """Pass the bytes on."""
        self._load(self._data)


class TensorRead:
    """A box of a stored tensor, and the tensor of the same shape that it is loaded into."""

    def __init__(
        self,
        item: Item,
        offsets: list[int],
        lengths: list[int],
        target: torch.Tensor,
        commit: Callable[[torch.Tensor], object],
    ) -> None:
        self.item = item
        self._lengths = lengths
        self._target = target
        self._commit = commit
        dtype = getattr(torch, item.dtype or "uint8", None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointDamagedError(f"`{item.fqn}` has the unknown dtype {item.dtype!r}")
        self._dtype: torch.dtype = dtype
        shape, size = item.shape, dtype.itemsize
        inside = len(offsets) == len(lengths) == len(shape) and all(
            0 <= offset <= offset + length <= extent
            for offset, length, extent in zip(offsets, lengths, shape, strict=True)
        )
        if not inside or prod(shape) * size != item.length:
            raise CheckpointDamagedError(
                f"the manifest's part of `{item.fqn}` at {item.origin} has the shape {shape}, "
                f"without {lengths} at {offsets}"
            )
        if list(target.shape) != lengths:
            raise CheckpointError(
                f"`{item.fqn}`: the load planner gave a tensor of shape {list(target.shape)} for a "
                f"part of shape {lengths}"
            )
        self._strides = list(accumulate(reversed(shape[1:]), mul, initial=1))[::-1][: len(shape)]
        first = sum(map(mul, offsets, self._strides))
        last = first + sum(
            (length - 1) * stride for length, stride in zip(lengths, self._strides, strict=True)
        )
        elements = prod(lengths)
        self._low: int = first * size if elements else 0
        self._high: int = (last + 1) * size if elements else 0
        self.length = self._high - self._low
        self._is_range = self.length == elements * size
        self._copies: list[tuple[memoryview, memoryview]] = []
        self._base = 0
        self._data = bytearray()

    def runs(self, block_bytes: int) -> list[_Run]:
        """Read straight into the target where that is possible."""
        if not self.length:
            return []
        if self._is_range and self._takes_bytes():
            return self._direct_runs(block_bytes)
        self._base = self._low // block_bytes * block_bytes
        end = min(-(-self._high // block_bytes) * block_bytes, self.item.length)
        self._data = bytearray(end - self._base)
        return [_Run(self._base, memoryview(self._data))]

    def _takes_bytes(self) -> bool:
        target = self._target
        return (
            target.device.type == "cpu"
            and target.dtype == self._dtype
            and target.layout is torch.strided
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
        )

    def _direct_runs(self, block_bytes: int) -> list[_Run]:
        address = self._target.data_ptr()
        target = memoryview((ctypes.c_char * self.length).from_address(address)).cast("B")
        low, high = self._low, self._high
        inner_low = -(-low // block_bytes) * block_bytes
        inner_high = high if high == self.item.length else high // block_bytes * block_bytes
        if inner_low >= inner_high:  # no whole block
            base = low // block_bytes * block_bytes
            end = min(-(-high // block_bytes) * block_bytes, self.item.length)
            return [self._edge(target, base, end, low, high)]
        runs = [_Run(inner_low, target[inner_low - low : inner_high - low])]
        if low < inner_low:
            runs.append(self._edge(target, inner_low - block_bytes, inner_low, low, inner_low))
        if inner_high < high:
            end = min(inner_high + block_bytes, self.item.length)
            runs.append(self._edge(target, inner_high, end, inner_high, high))
        return runs

    def _edge(self, target: memoryview, start: int, end: int, low: int, high: int) -> _Run:
        """Read whole blocks into a buffer, and copy a range of them to the target later."""
        buffer = memoryview(bytearray(end - start))
        part = target[low - self._low : high - self._low]
        self._copies.append((part, buffer[low - start : high - start]))
        return _Run(start, buffer)

    def finish(self) -> None:
        """Copy what was not read straight into the target, and give the tensor to the planner."""
        for part, data in self._copies:
            part[:] = data
        if self._data:
            stored = torch.frombuffer(self._data, dtype=self._dtype)
            start = (self._low - self._base) // self._dtype.itemsize
            self._target.copy_(stored.as_strided(self._lengths, self._strides, start))
        self._commit(self._target)
        self._copies, self._data = [], bytearray()


def read_all(files: Files, folder: str, index: Index, reads: list[Read]) -> None:
    """Read, verify every block, then finish; an error names file, bytes and tensor."""
    runs = [(read.item, run) for read in reads for run in read.runs(index.block_bytes)]
    requests = [
        (item, run.start + at, run.buffer[at : at + REQUEST_BYTES])
        for item, run in runs
        for at in range(0, len(run.buffer), REQUEST_BYTES)
    ]
    try:
        counts = files.batch_read_into(
            [(f"{folder}/{item.shard}", item.offset + at, part) for item, at, part in requests]
        )
    except FileNotFoundError as error:
        shards = dict.fromkeys(f"{folder}/{item.shard}" for item, _ in runs)
        missing = [path for path in shards if not files.exists(path)]
        raise CheckpointDamagedError(
            f"{', '.join(missing)} is missing" if missing else f"{folder} was replaced meanwhile"
        ) from error
    for (item, at, part), count in zip(requests, counts, strict=True):
        if count != len(part):
            raise CheckpointDamagedError(
                f"{folder}/{item.shard} ends at byte {item.offset + at + count}, inside of "
                f"`{item.fqn}`"
            )
    for item, run in runs:
        for at in range(0, len(run.buffer), index.block_bytes):
            block = run.buffer[at : at + index.block_bytes]
            expected = item.checksums[(run.start + at) // index.block_bytes]
            if checksum(index.algorithm, block) != expected:
                start = item.offset + run.start + at
                raise CheckpointDamagedError(
                    f"{folder}/{item.shard}: wrong checksum of bytes {start} to "
                    f"{start + len(block)}, part of `{item.fqn}`"
                )
    for read in reads:
        read.finish()

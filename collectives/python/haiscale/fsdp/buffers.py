"""Memory of collectives: blocks that are taken once and used again.

A block returns to its pool when the last tensor that views it is gone: a gradient that the script
keeps, or an operation that still runs, keeps its block. So no buffer is ever handed out twice.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from haiscale.overlap.groups import communicator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

__all__ = ["Buffers"]

_LOG = logging.getLogger("haiscale")


class Buffers:
    """Blocks of the memory of one process group, by size; registered where it is HFReduce's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.blocks = 0
        """Blocks taken so far. Constant after the second step."""
        self.bytes = 0
        """Of these blocks."""
        self._communicator = communicator(group)
        self._is_registered = True
        self._free: dict[int, deque[Any]] = defaultdict(deque)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with any content."""
        numel = math.prod(size)
        if numel == 0:
            return torch.empty(size, dtype=dtype)
        free = self._free[numel * dtype.itemsize]
        block = free.popleft() if free else self._allocate(numel * dtype.itemsize)
        # torch holds this view for as long as a tensor uses the memory.
        view = memoryview(block)
        weakref.finalize(view, free.append, block).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=numel).view(size)

    def _allocate(self, size_bytes: int) -> Any:
        self.blocks += 1
        self.bytes += size_bytes
        if self._communicator is not None and self._is_registered:
            try:
                return self._communicator.allocate(size_bytes)
            except ValueError as error:
                # The bits are the same in any memory.
                self._is_registered = False
                _LOG.warning("collectives of shards use memory that is not registered: %s", error)
        return bytearray(size_bytes)

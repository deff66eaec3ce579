"""Checksums by algorithm name: a checkpoint is verified with the algorithm that wrote it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from threefs.checkpoint.errors import CheckpointDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALGORITHM", "checksum"]


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


def _crc32c_slow(data: Any, initial: int = 0) -> int:
    """Fallback without the native module: correct, at a few megabytes per second."""
    table, crc = _crc32c_table(), initial ^ 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


_ALGORITHMS: dict[str, Callable[[Any, int], int]] = {"crc32c": _crc32c_slow, "crc32": zlib.crc32}
try:
    from threefs._native import crc32c as _crc32c_native
except ImportError:  # the package is built with it; a copy of its source is not
    ALGORITHM = "crc32"
else:
    _ALGORITHMS["crc32c"] = _crc32c_native
    ALGORITHM = "crc32c"
"""Algorithm for new checkpoints: the fastest one available."""


def checksum(algorithm: str, data: Any, initial: int = 0) -> int:
    """The checksum of bytes by an algorithm's name, continued from `initial`."""
    function = _ALGORITHMS.get(algorithm)
    if function is None:
        valid = ", ".join(_ALGORITHMS)
        raise CheckpointDamagedError(f"unknown checksum {algorithm!r}; there are: {valid}")
    return function(data, initial)

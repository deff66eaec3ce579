"""Bytes that the daemons of a mount have read, from the counters in its state file."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COUNTERS", "DISTANCES", "OFFSET", "read_bytes"]

DISTANCES = ("host", "rack", "zone", "remote")
"""Distances of a reader from the replica that answers, in the order of the counters."""
COUNTERS = struct.Struct(f"={len(DISTANCES)}Q")
OFFSET = 303_168
"""Offset of the counters: `_native.MOUNT_READS_OFFSET`, which this package does not load."""


def read_bytes(state_file: Path) -> list[int] | None:
    """Bytes by distance; None if no daemon has counted any.

    The daemon's user can write the file: it is read without following links or waiting.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(state_file, flags)
    except OSError:
        return None
    try:
        counters = os.pread(descriptor, COUNTERS.size, OFFSET)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return list(COUNTERS.unpack(counters)) if len(counters) == COUNTERS.size else None

"""FUSE connections by the device of their mount, through /sys: no request, so nothing can hang.

All best effort: /sys may be read-only or without fusectl, and all works without, only later.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["abort", "read_further_ahead", "waiting"]

READ_AHEAD_KIBIBYTES = 4096
CONNECTIONS = Path("/sys/fs/fuse/connections")


def read_further_ahead(device: str) -> None:
    """For sequential readers."""
    with contextlib.suppress(OSError):
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(READ_AHEAD_KIBIBYTES))


def abort(device: str) -> None:
    """End a connection: whatever waits for its daemon gets an error."""
    with contextlib.suppress(OSError):
        (_folder(device) / "abort").write_text("1")


def waiting(device: str) -> int:
    """How many requests have no answer yet; 0 also when that cannot be seen."""
    with contextlib.suppress(OSError, ValueError):
        return int((_folder(device) / "waiting").read_text())
    return 0


def _folder(device: str) -> Path:
    return CONNECTIONS / device.partition(":")[2]

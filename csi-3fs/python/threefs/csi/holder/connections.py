"""FUSE connections by the device of their mount, through /sys: no request, so nothing can hang.

All best effort: /sys may be read-only or without fusectl. Without it aborting does nothing (a
connection ends with its last descriptor, only later), and how much waits is not known.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from . import syscalls

__all__ = ["abort", "make_visible", "read_further_ahead", "waiting"]

READ_AHEAD_KIBIBYTES = 4096
CONNECTIONS = Path("/sys/fs/fuse/connections")
MOUNT_SECONDS = 3.0


def make_visible() -> bool:
    """Mount fusectl, which a container's own /sys comes without; false where that cannot be."""
    if not CONNECTIONS.is_mount():
        with contextlib.suppress(syscalls.TimedOut, OSError):
            syscalls.call("connections", str(CONNECTIONS), timeout=MOUNT_SECONDS)
    return CONNECTIONS.is_mount()


def read_further_ahead(device: str) -> None:
    """For sequential readers."""
    with contextlib.suppress(OSError):
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(READ_AHEAD_KIBIBYTES))


def abort(device: str) -> None:
    """End a connection: whatever waits for its daemon gets an error."""
    with contextlib.suppress(OSError):
        (_folder(device) / "abort").write_text("1")


def waiting(device: str) -> int | None:
    """How many requests have no answer yet; none where that cannot be seen."""
    try:
        return int((_folder(device) / "waiting").read_text())
    except FileNotFoundError:
        # An ended connection is not there any more.
        return 0 if CONNECTIONS.is_mount() else None
    except (OSError, ValueError):
        return None


def _folder(device: str) -> Path:
    return CONNECTIONS / device.partition(":")[2]

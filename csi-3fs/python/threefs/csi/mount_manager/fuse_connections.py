"""FUSE connections by the device of their mount, through /sys: no request is sent, nothing hangs.

All operations are best effort: /sys may be read-only or lack fusectl. Without it `abort` does
nothing (a connection then ends with its last descriptor), and the number of waiting requests is
unknown.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from . import syscalls

__all__ = ["abort", "mount_fusectl", "set_read_ahead", "waiting"]

READ_AHEAD_KIBIBYTES = 4096
CONNECTIONS = Path("/sys/fs/fuse/connections")
MOUNT_SECONDS = 3.0


def mount_fusectl() -> bool:
    """Mount fusectl, which is missing in a container's /sys; return whether it is available."""
    if not CONNECTIONS.is_mount():
        with contextlib.suppress(syscalls.TimedOut, OSError):
            syscalls.call("connections", str(CONNECTIONS), timeout=MOUNT_SECONDS)
    return CONNECTIONS.is_mount()


def set_read_ahead(device: str) -> None:
    """Raise the read-ahead of a mount, for sequential readers."""
    with contextlib.suppress(OSError):
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(READ_AHEAD_KIBIBYTES))


def abort(device: str) -> None:
    """Abort a connection: all requests that wait for its daemon fail."""
    with contextlib.suppress(OSError):
        (_folder(device) / "abort").write_text("1")


def waiting(device: str) -> int | None:
    """Return the number of unanswered requests, or None if it is unknown."""
    try:
        return int((_folder(device) / "waiting").read_text())
    except FileNotFoundError:
        # A connection that has ended has no folder.
        return 0 if CONNECTIONS.is_mount() else None
    except (OSError, ValueError):
        return None


def _folder(device: str) -> Path:
    return CONNECTIONS / device.partition(":")[2]

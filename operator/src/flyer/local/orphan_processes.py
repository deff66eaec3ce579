"""Orphan processes: kills those that an earlier driver of the state directory left behind.

The kernel kills pods with their driver, so none are expected. A new driver still searches for the
marker that its pods have in their environment, before it reports a node as empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

from flyer.errors import ExitStatus, FlyerError

__all__ = ["MARKER", "find_marked", "kill_orphans"]

MARKER: Final = "FLYER_DRIVER_STATE"
GONE_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.02


def find_marked(root: Path) -> list[int]:
    """Processes of this user with the marker of this state directory."""
    marker = os.fsencode(f"{MARKER}={root}")
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def kill_orphans(root: Path) -> int:
    """Kill them and wait until they have ended; returns their number."""
    pids = marked = find_marked(root)
    deadline = time.monotonic() + GONE_SECONDS
    while marked:
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise FlyerError(
                f"cannot kill processes of an earlier run: {', '.join(map(str, marked))}",
                exit_status=ExitStatus.UNREACHABLE,
                code="OrphanProcesses",
                hint="look at them with `ps`; a process in disk wait ends with its disk",
            )
        time.sleep(POLL_SECONDS)
        marked = find_marked(root)
    return len(pids)

"""Finds processes that an earlier driver of the same state directory left behind.

There should be none: the kernel kills pods with their driver. A new driver looks all the same,
by the marker that every process of ours carries in its environment, before it calls a node empty.
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
    """Processes of ours that carry the marker of this state directory."""
    wanted = os.fsencode(f"{MARKER}={root}")
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_orphans(root: Path) -> int:
    """Kill them and wait until they are gone; how many there were."""
    found = marked = find_marked(root)
    deadline = time.monotonic() + GONE_SECONDS
    while marked:
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise FlyerError(
                f"processes of an earlier run do not die: {', '.join(map(str, marked))}",
                exit_status=ExitStatus.UNREACHABLE,
                code="OrphanProcesses",
                hint="look at them with `ps`; a process in disk wait ends with its disk",
            )
        time.sleep(POLL_SECONDS)
        marked = find_marked(root)
    return len(found)

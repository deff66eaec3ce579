"""Run folders outside their state directory, for paths that are too long for a socket's address.

They are in the temporary folder, where they remain after their state directory was deleted. Each
driver removes unused ones at its start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flyer.local.state_directory import StatePaths, owned_privately

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OWNER", "remove_dead", "sign"]

OWNER = "state"
"""The file in a run folder that names the state directory."""
QUIET_SECONDS = 600.0
"""A younger folder may be in use by a starting driver."""
UNSIGNED_SECONDS = 86_400.0
"""Age limit of a folder that does not name its state directory."""


def sign(paths: StatePaths) -> None:
    """Record the state directory in a run folder outside of it."""
    if paths.run.parent != paths.root:
        (paths.run / OWNER).write_text(f"{paths.root}\n")


def remove_dead(paths: StatePaths, now: float | None = None) -> int:
    """Remove this user's run folders without a state directory. Returns their number."""
    moment = time.time() if now is None else now
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"flyer-{os.getuid()}-*"):
        with contextlib.suppress(
            OSError
        ):  # another process removed it, or it belongs to another user
            if folder != paths.run and owned_privately(folder):
                with _dead(folder, moment) as dead:
                    if dead:
                        shutil.rmtree(folder)
                        removed += 1
    return removed


@contextlib.contextmanager
def _dead(folder: Path, now: float) -> Iterator[bool]:
    """Whether the folder is unused; no driver of its state can start during the check."""
    idle = now - folder.lstat().st_mtime
    try:
        root = Path((folder / OWNER).read_text().strip())
    except FileNotFoundError:
        yield idle > UNSIGNED_SECONDS
        return
    if idle <= QUIET_SECONDS or StatePaths(root).run != folder:
        yield False
        return
    try:
        descriptor = os.open(StatePaths(root).lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield not root.exists()
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True  # a later driver creates it again
    finally:
        os.close(descriptor)

"""Removes a cluster: its processes, mounts, interfaces, control groups and files."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from e2e.cluster.errors import ClusterError
from e2e.cluster.processes import kill_all
from e2e.cluster.state import State, locked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["down", "remove"]


def down(folder: Path) -> None:
    """Removes the cluster of this folder; nothing is left, nothing happens where there is none."""
    folder = folder.resolve()
    with locked(folder):
        remove(folder)


def remove(folder: Path) -> None:
    """What `down` does, for a caller that holds the lock."""
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if "state.json" not in found and found - {"state.json.new"}:
        raise ClusterError(
            f"{folder} holds no cluster (no state.json) and is not empty; not removed"
        )
    kill_all(State(folder))
    shutil.rmtree(folder, ignore_errors=True)

"""Removes a cluster: its processes, mounts, interfaces, control groups and files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from testcluster import kind, network
from testcluster.errors import ClusterError
from testcluster.node import cgroup
from testcluster.processes import kill_all
from testcluster.state import State, locked

__all__ = ["down", "remove"]


def down(folder: Path) -> None:
    """Removes the cluster of this folder completely; does nothing if it does not exist."""
    folder = folder.resolve()
    with locked(folder):
        remove(folder)


def remove(folder: Path) -> None:
    """Same as `down`, for a caller that holds the lock."""
    names_present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if "state.json" not in names_present and names_present - {"state.json.new"}:
        raise ClusterError(
            f"{folder} holds no cluster (no state.json) and is not empty; not removed"
        )
    state = State.load(folder) if "state.json" in names_present else State(folder)
    if state.kind:
        kind.delete(state)
    kill_all(state)
    network.remove(state)
    _remove_cgroups(state)
    _remove_files(folder)


def _remove_files(folder: Path) -> None:
    """Removes the state last, so that an interrupted `down` can be repeated."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != "state.json":
            path.unlink()
    if folder.exists():
        shutil.rmtree(folder)


def _remove_cgroups(state: State, deadline_s: float = 20) -> None:
    """Removes the cluster's control groups once the kernel has reaped their processes."""
    deadline = time.monotonic() + deadline_s
    tops = list(Path("/sys/fs/cgroup").glob(f"*{cgroup(state)}"))
    for folder in (f for top in tops for f in [*sorted(top.rglob("*/"), reverse=True), top]):
        while folder.exists():
            try:
                folder.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"control group {folder} stays: {error}") from None
                time.sleep(0.05)

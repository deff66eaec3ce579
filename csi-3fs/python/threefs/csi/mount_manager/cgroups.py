"""Control groups of the FUSE daemons: each volume's daemons have their own memory limit.

A mount manager in a container with writable control groups v2 divides the container's group:

    container's group     memory.max: the container's limit
      manager             this process and the other processes of the container
      daemons             memory.max: the limit minus the manager's reserve
        DIGEST            memory.max: one volume's limit; its processes are killed together

A daemon that exceeds its volume's limit is killed alone. When all daemons together reach their
limit, the kernel kills the largest one, because all have the same OOM score; the manager is not in
that group.
"""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CgroupError", "Cgroups", "Group", "divide", "own_group", "without_group"]

ROOT = Path("/sys/fs/cgroup")
MANAGER_BYTES = 256 << 20
"""Part of the container's limit reserved for the manager and its children; at most half of it."""
VOLUME_BYTES_MAX = 1 << 30
"""Memory limit of one volume's daemons, with kernel memory and cache, as in `threefs.confine`."""
MOVE_SECONDS, PAUSE_SECONDS = 5.0, 0.02
"""Timeout and interval of moving processes out of a group in which probes start and end."""
WITHOUT = "the daemon has no control group"
"""Log message of a daemon whose memory is bounded only by its own limit."""
UNGROUPED_BYTES_MAX = 512 << 20
"""Private memory of a daemon without a group: its 256 requests of 1 MiB, and as much again."""
LIMIT = f"ulimit -d {UNGROUPED_BYTES_MAX >> 10}"
ENTER = f'echo 0 > "$0" || {{ echo "{WITHOUT}: cannot enter $0" >&2; {LIMIT}; }}; exec "$@"'


class CgroupError(Exception):
    """Control groups cannot be divided here; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one volume's daemons."""

    path: Path

    def enter(self, command: list[str]) -> list[str]:
        """Return a command that enters the group and executes `command`; OSError if it is missing.

        The process enters before it executes the daemon, because memory stays charged to the group
        in which it was allocated. A process that cannot enter executes the daemon anyway, with a
        lower limit (`without_group`) and a log message, so that the volume stays available.
        """
        self.path.mkdir(exist_ok=True)
        (self.path / "memory.max").write_text(f"{VOLUME_BYTES_MAX}")
        (self.path / "memory.oom.group").write_text("1")
        return ["/bin/sh", "-c", ENTER, str(self.path / "cgroup.procs"), *command]

    def kills(self) -> int:
        """Return the number of its processes that the kernel killed for lack of memory."""
        try:
            lines = (self.path / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The control groups of all volumes of this mount manager."""

    daemons: Path

    def of(self, name: str) -> Group:
        """Return the group with a plain name; it is created when a daemon starts in it."""
        return Group(self.daemons / name)

    def sweep(self, in_use: Callable[[], set[str]]) -> None:
        """Remove the groups of unmounted volumes.

        A mount is registered before its group is created, so `in_use` is called after listing.
        """
        existing = {folder.name for folder in self.daemons.iterdir() if folder.is_dir()}
        for name in existing - in_use():
            # A group with a process that has not ended yet stays until the next sweep.
            with suppress(OSError):
                (self.daemons / name).rmdir()


def without_group(command: list[str]) -> list[str]:
    """Return a command that executes `command` without a separate group.

    Its memory counts for the manager's group, which has no limit, so its own limit is lower.
    """
    return ["/bin/sh", "-c", f'{LIMIT}; exec "$@"', "sh", *command]


def own_group(root: Path = ROOT, process: Path = Path("/proc/self/cgroup")) -> Path:
    """Return the control group of this process, which is its container's."""
    paths = [
        line.removeprefix("0::")
        for line in process.read_text().splitlines()
        if line.startswith("0::")
    ]
    if not paths or not (root / "cgroup.controllers").exists():
        raise CgroupError(f"{root} is not control groups v2")
    group = root / paths[0].lstrip("/")
    # The machine's root group has no limit: this process is not in a container.
    if not (group / "memory.max").exists():
        raise CgroupError(
            f"{group} has no memory controller, or this process is not in a container"
        )
    return group


def divide(group: Path) -> Cgroups:
    """Create groups for this process and the daemons below `group`, which the manager owns."""
    manager, daemons = group / "manager", group / "daemons"
    try:
        manager.mkdir(exist_ok=True)
        daemons.mkdir(exist_ok=True)
        limit = (group / "memory.max").read_text().strip()
    except OSError as error:
        raise CgroupError(str(error)) from error
    _delegate_memory(group, manager)
    if limit != "max":
        whole = int(limit)
        _write(daemons / "memory.max", f"{whole - min(MANAGER_BYTES, whole // 2)}")
    _write(daemons / "cgroup.subtree_control", "+memory")
    return Cgroups(daemons)


def _delegate_memory(group: Path, manager: Path) -> None:
    """Move all processes out of `group`, which could not delegate controllers otherwise.

    A process that is exiting cannot be moved, and counts until it has ended.
    """
    deadline = time.monotonic() + MOVE_SECONDS
    while True:
        try:
            for pid in (group / "cgroup.procs").read_text().split():
                # The process may have ended since.
                with suppress(ProcessLookupError):
                    (manager / "cgroup.procs").write_text(pid)
        except OSError as error:
            raise CgroupError(_message(manager / "cgroup.procs", error)) from error
        try:
            (group / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise CgroupError(_message(group / "cgroup.subtree_control", error)) from error
        else:
            return
        time.sleep(PAUSE_SECONDS)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CgroupError(_message(path, error)) from error


def _message(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"

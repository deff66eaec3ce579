"""Control groups of the FUSE daemons: the memory of one volume's daemons is not another's.

A holder in a container, with control groups v2 that it may change, divides the container's group:

    container's group     memory.max: the container's limit
      holder              this process and what runs beside it
      daemons             memory.max: the limit without the holder's reserve
        DIGEST            memory.max: one volume's; its processes end together

A daemon beyond its volume's limit is killed alone. Where all daemons together reach theirs, the
kernel kills the largest one, because all have the same score; the holder is not in that group.
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

__all__ = ["ControlGroups", "Group", "IndivisibleError", "alone", "divide", "own_group"]

ROOT = Path("/sys/fs/cgroup")
HOLDER_BYTES = 256 << 20
"""Of the container's limit, for the holder and its children; at most half of the limit."""
VOLUME_BYTES_MAX = 1 << 30
"""What daemons of one volume may use with kernel memory and cache: as `threefs.confine`."""
MOVE_SECONDS, PAUSE_SECONDS = 5.0, 0.02
"""How long, and how often, processes are moved out of a group in which probes start and end."""
WITHOUT = "the daemon has no control group"
"""What the log says of a daemon whose memory nothing but its own limit bounds."""
ALONE_BYTES_MAX = 512 << 20
"""Private memory of a daemon without a group: its 256 requests of a MiB, and as much again."""
BOUND = f"ulimit -d {ALONE_BYTES_MAX >> 10}"
ENTER = f'echo 0 > "$0" || {{ echo "{WITHOUT}: it cannot enter $0" >&2; {BOUND}; }}; exec "$@"'


class IndivisibleError(Exception):
    """Control groups cannot be divided here; the message says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """The group of one volume's daemons."""

    path: Path

    def enter(self, command: list[str]) -> list[str]:
        """The command that becomes `command` inside the group; an OSError if there is none.

        The process enters before it is the daemon: memory stays charged to where it was taken. One
        that cannot enter becomes the daemon all the same, so that a volume is not kept from its
        pods: with a lower limit of its own (`alone`), and the log says so.
        """
        self.path.mkdir(exist_ok=True)
        (self.path / "memory.max").write_text(f"{VOLUME_BYTES_MAX}")
        (self.path / "memory.oom.group").write_text("1")
        return ["/bin/sh", "-c", ENTER, str(self.path / "cgroup.procs"), *command]

    def kills(self) -> int:
        """How many of its processes the kernel has killed because memory was short."""
        try:
            lines = (self.path / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The groups of all volumes of this holder."""

    daemons: Path

    def of(self, name: str) -> Group:
        """The group with a plain name, made when a daemon starts in it."""
        return Group(self.daemons / name)

    def sweep(self, used: Callable[[], set[str]]) -> None:
        """Remove the groups of volumes that are not mounted any more.

        A mount is known before its group is made: so what is used is asked after the list.
        """
        there = {one.name for one in self.daemons.iterdir() if one.is_dir()}
        for name in there - used():
            # With a process that has not ended yet it stays until the next sweep.
            with suppress(OSError):
                (self.daemons / name).rmdir()


def alone(command: list[str]) -> list[str]:
    """The command that becomes `command` without a group.

    What it takes counts for the holder's group, which has no limit: its own is lower instead.
    """
    return ["/bin/sh", "-c", f'{BOUND}; exec "$@"', "sh", *command]


def own_group(root: Path = ROOT, process: Path = Path("/proc/self/cgroup")) -> Path:
    """The group of this process: its container's."""
    paths = [
        line.removeprefix("0::")
        for line in process.read_text().splitlines()
        if line.startswith("0::")
    ]
    if not paths or not (root / "cgroup.controllers").exists():
        raise IndivisibleError(f"{root} is not control groups v2")
    group = root / paths[0].lstrip("/")
    # The machine's root group has no limit: this process is in no container.
    if not (group / "memory.max").exists():
        raise IndivisibleError(
            f"{group} has no memory controller, or this process is in no container"
        )
    return group


def divide(group: Path) -> ControlGroups:
    """Give this process and the daemons groups below `group`, which the holder has for itself."""
    holder, daemons = group / "holder", group / "daemons"
    try:
        holder.mkdir(exist_ok=True)
        daemons.mkdir(exist_ok=True)
        limit = (group / "memory.max").read_text().strip()
    except OSError as error:
        raise IndivisibleError(str(error)) from error
    _delegate_memory(group, holder)
    if limit != "max":
        whole = int(limit)
        _write(daemons / "memory.max", f"{whole - min(HOLDER_BYTES, whole // 2)}")
    _write(daemons / "cgroup.subtree_control", "+memory")
    return ControlGroups(daemons)


def _delegate_memory(group: Path, holder: Path) -> None:
    """A group with processes cannot give controllers to groups below it: move them first.

    One that is ending is not moved, and counts until it has ended.
    """
    deadline = time.monotonic() + MOVE_SECONDS
    while True:
        try:
            for pid in (group / "cgroup.procs").read_text().split():
                # It may have ended meanwhile.
                with suppress(ProcessLookupError):
                    (holder / "cgroup.procs").write_text(pid)
        except OSError as error:
            raise IndivisibleError(_said(holder / "cgroup.procs", error)) from error
        try:
            (group / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise IndivisibleError(_said(group / "cgroup.subtree_control", error)) from error
        else:
            return
        time.sleep(PAUSE_SECONDS)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise IndivisibleError(_said(path, error)) from error


def _said(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"

"""Resident memory and processor time of services without work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["descendants", "has_argument", "idle", "resident_bytes"]

SECONDS = 10


def idle(systems: Mapping[str, tuple[int, str]]) -> dict[str, float]:
    """Bytes and part of a processor of each system over one interval, all systems at the same time.

    A system is its first process, whose descendants count, and an argument of the processes that do
    not: those that serve a mount. Memory that processes share counts in each of them.
    """
    pids = {
        name: [pid for pid in (root, *descendants(root)) if not has_argument(pid, mount)]
        for name, (root, mount) in systems.items()
    }
    before = {name: sum(map(cpu_seconds, own)) for name, own in pids.items()}
    started = time.monotonic()
    time.sleep(SECONDS)
    after = {name: sum(map(cpu_seconds, own)) for name, own in pids.items()}
    seconds = time.monotonic() - started
    figures = {}
    for name, own in pids.items():
        figures[f"{name}: resident"] = float(sum(map(resident_bytes, own)))
        figures[f"{name}: processor"] = (after[name] - before[name]) / seconds
    return figures


def descendants(pid: int) -> list[int]:
    """The processes that a process and its children have started, of all threads."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def resident_bytes(pid: int) -> int:
    """The resident memory of a process now."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def has_argument(pid: int, mount: str) -> bool:
    """Whether a path is an argument of a process, or in its title as in `(mounted on: PATH)`."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return bool(mount) and mount in command.replace(")", "\0").replace(" ", "\0").split("\0")

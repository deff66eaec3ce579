"""Removes unused programs, images and wheels of other versions from the cache.

Builds are stored under a hash of their sources, so an old entry is never stale. A use updates its
modification time; entries that were not used for a given time are removed and rebuilt on demand.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from programs import binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Pruned", "prune"]

DAY_SECONDS = 86_400.0
FOLDERS = ("bin", "images", "wheels")


@dataclass(frozen=True, slots=True)
class Pruned:
    """One build that was removed, or would be."""

    path: Path
    bytes: int


def prune(days_unused: float, now: float, *, dry_run: bool = False) -> list[Pruned]:
    """Remove entries of other versions unused for `days_unused` days; returns the largest first."""
    cache = binaries.cache()
    current = binaries.folders()
    builds = []
    for folder in FOLDERS:
        for path in sorted((cache / folder).glob("*")):
            if path in current or path.is_symlink() or (folder == "images" and path.is_dir()):
                continue
            if now - _used_at(path) < days_unused * DAY_SECONDS:
                continue
            with _unused(path) as free:
                if free:
                    builds.append(Pruned(path, _size(path)))
                    if not dry_run:
                        _remove(path)
    return sorted(builds, key=lambda build: -build.bytes)


def _used_at(path: Path) -> float:
    """The last use: the newest time of the path and its entries."""
    times = [path, *path.glob("*")] if path.is_dir() else [path]
    return max(item.lstat().st_mtime for item in times)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(item.lstat().st_size for item in files if not item.is_dir())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Whether no build holds its lock."""
    lock = path / ".lock"
    if not lock.exists():
        yield True
        return
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True

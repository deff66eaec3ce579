"""The folder of periodic backups: unverified files that are locked while they are written."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from threefs.cli.rotation import draft_of, is_draft, later, name_of, surplus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["draft", "publish", "remove_abandoned_drafts", "rotate"]


def remove_abandoned_drafts(folder: Path, kind: str) -> None:
    """Remove what interrupted backups have left, unless another process holds its lock."""
    for path in folder.iterdir():
        if not is_draft(kind, path.name):
            continue
        # Another process may publish or remove it. A file system without locks keeps it.
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), path.stat()):
                    path.unlink()
            finally:
                os.close(fd)


@contextmanager
def draft(folder: Path, kind: str) -> Iterator[Path]:
    """The file of a new backup. It is locked, and removed at the end unless it is published."""
    path = folder / draft_of(kind, datetime.now(UTC), secrets.token_hex(8))
    partial = path.with_name(path.name + ".partial")
    # The dump is written to this file, and then renamed: the lock stays with it.
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = partial.exists()
        except BlockingIOError:
            locked = False
        except OSError:
            # Without locks, no backup removes the drafts of others.
            locked = True
        if not locked:
            raise OSError(
                f"`{partial}` was removed by another backup at its start; repeat this one"
            )
        yield path
    finally:
        path.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
        os.close(fd)


def publish(path: Path, kind: str, cluster: int) -> Path:
    """Give a verified draft the name of a backup; fails if this name exists."""
    target = path.with_name(name_of(kind, cluster, datetime.now(UTC)))
    if target.exists():
        raise OSError(f"`{target}` exists: another backup has the same second; repeat this one")
    path.rename(target)
    fd = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return target


def rotate(newest: Path, kind: str, cluster: int, keep: int) -> list[str]:
    """Remove the surplus backups; returns those with a later name, which are not touched."""
    names = [path.name for path in newest.parent.iterdir()]
    for name in surplus(kind, cluster, names, newest.name, keep):
        (newest.parent / name).unlink(missing_ok=True)
    return later(kind, cluster, names, newest.name)

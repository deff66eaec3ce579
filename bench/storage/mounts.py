"""Mount measurements: files of programs, compared with a local directory.

Two mounts of one cluster: as several nodes use it (written through), and as a volume of one node is
mounted (`--write-back`). Both end with an fsync, as fio does. Needs root and /dev/fuse.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from threefs.mount import Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import threefs

__all__ = ["can_mount", "create", "mounted", "read", "steps", "write"]

BLOCK_BYTES = 1 << 20
FILES = 400
CREATORS = 8


def can_mount() -> bool:
    """Whether this user can mount here."""
    return os.geteuid() == 0 and Path("/dev/fuse").exists()


def write(path: Path, size: int) -> float:
    """Bytes per second of one program: 1 MiB at a time, in order, an fsync at the end."""
    block = os.urandom(BLOCK_BYTES)
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
    return size / (time.monotonic() - started)


def read(path: Path) -> float:
    """Bytes per second of one program, 1 MiB at a time, nothing of it in this machine's memory."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        block = bytearray(BLOCK_BYTES)
        started = time.monotonic()
        while file.readinto(block):
            pass
    return size / (time.monotonic() - started)


def create(folder: Path, creators: int) -> float:
    """Files per second created by this number of threads, each in a separate directory."""

    def some(number: int) -> None:
        own = folder / f"{time.monotonic_ns()}-{number}"
        own.mkdir()
        for name in range(FILES // creators):
            os.close(os.open(own / str(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    threads = [threading.Thread(target=some, args=(number,)) for number in range(creators)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return FILES // creators * creators / (time.monotonic() - started)


@contextmanager
def mounted(cluster: Path, folder: Path, client: threefs.Client) -> Iterator[dict[str, Path]]:
    """A mount that is written through and one that is written behind."""
    mounts = []
    try:
        for name, write_back in (("mount", False), ("mount, write-back", True)):
            root, target = f"/{name.replace(', ', '-')}", folder / name.replace(", ", "-")
            client.make_directory(root, 0o777)
            target.mkdir()
            state = Path("/dev/shm") / f"{os.getpid()}-{target.name}.state"
            mounts.append((name, Mount(cluster, root, target, state, write_back=write_back)))
        yield {name: mount.target for name, mount in mounts}
    finally:
        for _, mount in mounts:
            mount.close()


def steps(places: dict[str, Path], size: int) -> dict[str, Callable[[], float]]:
    """The measurements in each directory, with the names of the file rates."""
    result: dict[str, Callable[[], float]] = {}
    for name, folder in places.items():
        result[f"{name}: write"] = partial(write, folder / "file", size)
        result[f"{name}: read"] = partial(read, folder / "file")
        result[f"{name}: creates/s, 1 thread"] = partial(create, folder, 1)
        result[f"{name}: creates/s, {CREATORS} threads"] = partial(create, folder, CREATORS)
    return result

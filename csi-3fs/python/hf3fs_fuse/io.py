"""Reads and writes of files in a mount through rings in shared memory.

    fd = os.open(path, os.O_RDONLY)
    register_fd(fd)
    mount = extract_mount_point(path)
    memory = make_iovec(SharedMemory(create=True, size=1 << 20), mount)
    ring = make_ioring(mount, entries=64)
    ring.prepare(memory[:4096], True, fd, 0)
    [done] = ring.submit().wait(min_results=1)
    done.result  # bytes, or a negative errno

Errors are OSError with the errno that `hf3fs_usrbio.h` describes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from threefs._native import deregister_fd, extract_mount_point, ioring, iovec, register_fd

if TYPE_CHECKING:
    from multiprocessing.shared_memory import SharedMemory

__all__ = [
    "deregister_fd",
    "extract_mount_point",
    "ioring",
    "iovec",
    "make_ioring",
    "make_iovec",
    "register_fd",
]


def make_iovec(
    shm: SharedMemory, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
) -> iovec:
    """Register shared memory for the rings of a mount.

    `shm` may be unlinked afterwards. No I/O may cross a multiple of `block_size`; 0: no limit.
    """
    if shm.buf is None:
        raise ValueError(f"the shared memory `{shm.name}` is closed")
    return iovec(shm.name, shm.buf, hf3fs_mount_point, block_size, numa)


def make_ioring(
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,  # noqa: FBT001, FBT002
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> ioring:
    """Make a ring with room for `entries` reads, or writes.

    `io_depth`: 0 submits whatever is prepared; above 0, I/Os are submitted in groups of this size;
    below 0, at most this number is executed at once. `flags`: 2 makes reads of holes fail.
    `priority` and `timeout` have no effect.
    """
    return ioring(hf3fs_mount_point, entries, for_read, io_depth, priority, timeout, numa, flags)

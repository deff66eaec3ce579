"""One mount call in a child process: ``python syscalls.py OPERATION ARGUMENT…``.

mount(2) and umount2(2) may block on a daemon that does not answer. A child process can be killed;
the mount manager cannot. Exit status: 0 for success, otherwise the errno.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NOT_OPENED", "TimedOut", "call", "start"]

NOT_OPENED = 255
"""Exit status of `sync` when the target could not be opened; above every errno."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_BIND, MS_RELATIME = 32, 1024, 4096, 1 << 21
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
READ_BYTES_MAX = 1 << 20
"""Largest read request to the daemon: the size of a file chunk."""

FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "relatime": MS_RELATIME,
}


class TimedOut(Exception):  # noqa: N818
    """The child did not end in time; it was killed, and dies when the kernel allows it."""


def call(operation: str, *arguments: str, timeout: float, keep: tuple[int, ...] = ()) -> None:
    """Run one operation in a child; a failure raises OSError with its errno."""
    child = start(operation, *arguments, keep=keep)
    try:
        status = child.wait(timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        # Not waited for: it may be blocked in the kernel. Popen reaps it later.
        raise TimedOut(f"{operation} {' '.join(arguments[-1:])} took over {timeout:g} s") from None
    if status > 0:
        raise OSError(status, os.strerror(status), arguments[-1])
    if status < 0:
        raise TimedOut(f"{operation} was killed by signal {-status}")


def start(operation: str, *arguments: str, keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start one operation in a child; its exit status is the errno."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, operation, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=keep,
    )


def main(arguments: list[str]) -> int:
    """Run one operation in this process: the child's side."""
    operation, *rest = arguments
    try:
        OPERATIONS[operation](*rest)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def fuse(descriptor: str, source: str, kind: str, options: str, target: str) -> None:
    """Mount a FUSE file system on a new directory."""
    os.makedirs(target, mode=0o750, exist_ok=True)  # noqa: PTH103 -- a child starts in 20 ms
    flags = MS_NOSUID | MS_NODEV | MS_NOATIME
    data = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
    data += f",max_read={READ_BYTES_MAX}"
    if "ro" in options.split(","):
        flags |= MS_RDONLY
    _mount(source, target, kind, flags, data)


def connections(target: str) -> None:
    """Mount fusectl, which has a directory for each FUSE connection."""
    _mount("fusectl", target, "fusectl", MS_NOSUID | MS_NODEV | MS_NOEXEC, "")


def bind(source: str, options: str, target: str) -> None:
    """Bind-mount at a second target, with separate flags."""
    os.makedirs(target, mode=0o750, exist_ok=True)  # noqa: PTH103
    _mount(source, target, "", MS_BIND, "")
    flags = MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV
    for name in filter(None, options.split(",")):
        flags |= FLAGS[name]
    try:
        _mount("", target, "", flags, "")
    except OSError:
        with contextlib.suppress(OSError):
            _unmount(target, MNT_DETACH)
        raise


def unmount(target: str) -> None:
    """Unmount the topmost mount; fails while files on it are open."""
    _unmount(target, UMOUNT_NOFOLLOW)


def sync(target: str) -> None:
    """Write out the kernel's dirty data of a mount."""
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        sys.exit(NOT_OPENED)
    if libc().syncfs(descriptor):
        raise OSError(ctypes.get_errno(), "syncfs", target)


def detach(target: str) -> None:
    """Detach the topmost mount lazily; it ends with its last user."""
    _unmount(target, MNT_DETACH | UMOUNT_NOFOLLOW)


def remove(target: str) -> None:
    """Remove an empty directory that is not a mount point."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(target)  # noqa: PTH106


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    arguments = [os.fsencode(text) or None for text in (source, target, kind)]
    if libc().mount(*arguments, ctypes.c_ulong(flags), data.encode() or None):
        raise OSError(ctypes.get_errno(), "mount", target)


def _unmount(target: str, flags: int) -> None:
    if libc().umount2(os.fsencode(target), flags):
        raise OSError(ctypes.get_errno(), "umount2", target)


def libc() -> ctypes.CDLL:
    """The C library."""
    return ctypes.CDLL(None, use_errno=True)


OPERATIONS: dict[str, Callable[..., None]] = {
    "fuse": fuse,
    "connections": connections,
    "bind": bind,
    "unmount": unmount,
    "detach": detach,
    "sync": sync,
    "remove": remove,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checks of this machine: what mounts and services need of its kernel, and its mounts of 3FS.

Reads /proc, /sys and /dev only; changes nothing.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from threefs.doctor.finding import Finding, Severity
from threefs.mount import FILE_SYSTEM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["check_machine", "mounts_of"]

RESEND_KERNEL = (6, 9)
"""The first one whose FUSE repeats unanswered requests for a new daemon (FUSE_NOTIFY_RESEND)."""

OPEN_FILES = 4096
"""Connections of a storage service, or open files of a busy mount."""

MOUNTS_EXAMINED_MAX = 64
MOUNT_REPLY_SECONDS = 5.0
"""statvfs(3) is never answered from a cache: it needs the daemon and a metadata service."""


def check_machine(
    root: Path, replying: Callable[[Sequence[str]], set[str]] | None = None
) -> Iterator[Finding]:
    """All checks of the machine whose file systems are below `root`.

    `replying` returns those mount points whose file systems reply; default: tries them.
    """
    yield _kernel(root)
    yield _fuse_device(root)
    yield _io_uring(root)
    yield _open_files()
    yield from _mounts(root, replying or _replying)


def _kernel(root: Path) -> Finding:
    name = "kernel"
    release = _text(root / "proc/sys/kernel/osrelease")
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None:
        detail = f"unknown release `{release}`"
        return Finding(name, Severity.WARNING, detail, "mount /proc into this container")
    if (int(version[1]), int(version[2])) >= RESEND_KERNEL:
        return Finding(name, Severity.OK, f"Linux {release}")
    return Finding(
        name,
        Severity.WARNING,
        f"Linux {release}: requests that a FUSE daemon has not answered are lost when it dies",
        "mount on machines with Linux 6.9 or newer; other clients and services need no update",
    )


def _fuse_device(root: Path) -> Finding:
    name, device = "FUSE", root / "dev/fuse"
    try:
        is_device = stat.S_ISCHR(device.stat().st_mode)
    except OSError:
        is_device = False
    if not is_device:
        remedy = "modprobe fuse, or give the device to this container; only mounts need it"
        return Finding(name, Severity.WARNING, "no device /dev/fuse", remedy)
    if not os.access(device, os.R_OK | os.W_OK):
        detail = "/dev/fuse cannot be opened by this user"
        return Finding(name, Severity.WARNING, detail, "mount as root; only mounts need it")
    return Finding(name, Severity.OK, "/dev/fuse")


def _io_uring(root: Path) -> Finding:
    name = "io_uring"
    disabled = _text(root / "proc/sys/kernel/io_uring_disabled")
    if disabled in ("1", "2"):
        return Finding(
            name,
            Severity.WARNING,
            f"kernel.io_uring_disabled is {disabled}: storage services use slower system calls",
            "sysctl -w kernel.io_uring_disabled=0 on machines with storage services",
        )
    return Finding(name, Severity.OK, "not disabled by sysctl")


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        allowed = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} allowed"
        return Finding("open files", Severity.OK, allowed)
    return Finding(
        "open files",
        Severity.WARNING,
        f"{hard} allowed, fewer than {OPEN_FILES}",
        "raise the hard limit: LimitNOFILE= of the unit, or nofile in /etc/security/limits.conf",
    )


def _mounts(root: Path, replying: Callable[[Sequence[str]], set[str]]) -> Iterator[Finding]:
    mounts = mounts_of(_text(root / "proc/self/mountinfo"))
    if not mounts:
        yield Finding("mounts", Severity.OK, "none of 3FS on this machine")
    examined = mounts[:MOUNTS_EXAMINED_MAX]
    replies = replying(examined)
    silent = [point for point in examined if point not in replies]
    for point in silent:
        yield Finding(
            "mounts",
            Severity.PROBLEM,
            f"{point} did not reply within {MOUNT_REPLY_SECONDS:g} s",
            "if services are reachable, read the log of its mount manager, which replaces a "
            "daemon that died",
        )
    if len(examined) > len(silent):
        detail = f"{len(examined) - len(silent)} of {len(mounts)} reply"
        if len(mounts) > len(examined):
            detail += f"; {len(mounts) - len(examined)} were not examined"
        yield Finding("mounts", Severity.OK, detail)


def mounts_of(mountinfo: str) -> list[str]:
    """Mount points of 3FS in a /proc/self/mountinfo, proc_pid_mountinfo(5)."""
    points = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) > 4 and after.split(" ")[0] == FILE_SYSTEM.decode():
            points.append(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
    return points


def _replying(points: Sequence[str]) -> set[str]:
    """The mount points that reply, tried by processes: a call to a hung mount cannot be killed."""
    script = "import os, sys; os.statvfs(sys.argv[1])"
    processes = {
        point: subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script, point],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for point in points
    }
    deadline = time.monotonic() + MOUNT_REPLY_SECONDS
    replying = set()
    for point, process in processes.items():
        try:
            if process.wait(timeout=max(0.0, deadline - time.monotonic())) == 0:
                replying.add(point)
        except subprocess.TimeoutExpired:
            process.kill()
    return replying


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

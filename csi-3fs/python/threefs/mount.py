"""Mounts that survive their daemon: this process keeps the descriptor, the daemon is replaced.

A `Mount` opens /dev/fuse, calls mount(2) and starts the daemon with the descriptor. When the daemon
exits, `respawn` starts another one with the same descriptor: programs keep their open files.
Needs root (CAP_SYS_ADMIN), as mount(2) does.

A process with a `Mount` must not have files of that mount open: a child inherits them until it
executes the daemon, and closing them would wait for that daemon.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefs.daemon import CLAIM_SECONDS
from threefs.errors import ThreeFSError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FILE_SYSTEM", "Mount", "unmount"]

FILE_SYSTEM = b"fuse.hf3fs"
"""Type in the mount table, by which programs recognize mounts with rings."""

READY_SECONDS = 60.0
"""Time that a daemon has to become ready, including the cluster's reply about its root."""

READAHEAD_KB = 4096
"""Read-ahead of the kernel for a sequential reader."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME = 1, 2, 4, 1024
MNT_FORCE, MNT_DETACH = 1, 2


class Mount:
    """One mount of a directory of 3FS."""

    def __init__(
        self,
        cluster: Path,
        root: str,
        target: Path,
        state: Path,
        *,
        read_only: bool = False,
        write_back: bool = False,
        claim_for: str = "",
        claim_seconds: float = CLAIM_SECONDS,
        user: int = 0,
        timeout_seconds: float = 30.0,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.target = target
        self.ready: dict[str, Any] = {}
        self._command = [
            *(sys.executable, "-m", "threefs", "fuse"),
            *("--cluster", str(cluster), "--root", root, "--state", str(state)),
            *("--timeout", str(timeout_seconds)),
            *(["--read-only"] if read_only else []),
            *(["--write-back"] if write_back else []),
            *(["--claim-for", claim_for] if claim_for else []),
            *("--claim-seconds", str(claim_seconds)),
            *(["--user", str(user)] if user else []),
        ]
        self._environment = dict(environment or os.environ)
        self._log = log
        self.descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = (
            f"fd={self.descriptor},rootmode=40000,user_id=0,group_id=0,"
            "default_permissions,allow_other,max_read=1048576"
        )
        flags = MS_NOSUID | MS_NODEV | MS_NOATIME | (MS_RDONLY if read_only else 0)
        try:
            _call("mount", b"3fs", os.fsencode(target), FILE_SYSTEM, flags, options.encode())
        except BaseException:
            os.close(self.descriptor)
            raise
        try:
            self.process = self._spawn(resume=False)
            self._read_further_ahead()
        except BaseException:
            self.close()
            raise

    def respawn(self) -> None:
        """Replace the daemon, dead or alive; the next one answers its pending requests."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process = self._spawn(resume=True)

    def close(self) -> None:
        """Unmount and stop the daemon, in any state of both."""
        unmount(self.target)
        os.close(self.descriptor)
        process = getattr(self, "process", None)
        if process is not None:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, *, resume: bool) -> subprocess.Popen[str]:
        with Path(self._log or os.devnull).open("a") as errors:
            process = subprocess.Popen(
                [*self._command, "--fd", str(self.descriptor), *(["--resume"] * resume)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=[self.descriptor],
                env=self._environment,
            )
        line = _first_line(process, READY_SECONDS)
        if not line:
            process.kill()
            process.wait()
            log_end = "" if self._log is None else self._log.read_text()[-2000:]
            raise Unavailable(
                f"the daemon of `{self.target}` did not serve within {READY_SECONDS:g} s "
                f"(status {process.returncode}): {log_end}",
                deadline_seconds=READY_SECONDS,
                who="threefs fuse",
            )
        self.ready = json.loads(line)
        return process

    def _read_further_ahead(self) -> None:
        """Best effort: /sys may be read-only, and the mount works without it."""
        device = self.target.stat().st_dev
        knob = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        with suppress(OSError):
            Path(knob).write_text(str(READAHEAD_KB))


def unmount(target: Path) -> None:
    """Unmount, and abort pending requests. Returns immediately, in any state of the daemon."""
    for flags in (MNT_FORCE, MNT_DETACH):
        try:
            _call("umount2", os.fsencode(target), flags)
        except OSError:
            continue
        return


def _call(name: str, *arguments: bytes | int) -> None:
    """Make a system call of libc; the GIL is released meanwhile."""
    library = ctypes.CDLL(None, use_errno=True)
    converted = [
        ctypes.c_char_p(it) if isinstance(it, bytes) else ctypes.c_ulong(it) for it in arguments
    ]
    if getattr(library, name)(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _first_line(process: subprocess.Popen[str], seconds: float) -> str:
    """The first line that a process writes; empty if it ends or times out before."""
    if process.stdout is None:
        raise ThreeFSError("the daemon was started without a pipe")
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            if selector.select(remaining):
                return process.stdout.readline()
    return ""

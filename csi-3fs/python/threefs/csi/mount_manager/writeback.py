"""Flushing of dirty data to 3FS before an unmount.

The kernel caches written data and sends it later, so an unmount could lose it. A child process,
which may block for any time, syncs the mount: each request checks it, asks its caller to retry,
and gives up after the writeback timeout.
"""

from __future__ import annotations

import os
import subprocess
import time

from . import fuse_connections, syscalls

__all__ = ["Writeback"]

PAUSE_SECONDS = 0.01


class Writeback:
    """Writeback of one mount, from its first unmount request on. One call at a time."""

    def __init__(self, target: str, device: str) -> None:
        self._target = target
        self._device = device
        self._child: subprocess.Popen[bytes] | None = None
        self._first_refusal: float | None = None
        self.error = ""
        """The kernel's error for data that it could not write and has dropped."""
        self.unverified = False
        """Whether it is unknown if all requests that were sent have been answered."""

    def flush(self, seconds: float) -> str:
        """Flush for at most this time; return why it is not done yet, or an empty string."""
        deadline = time.monotonic() + seconds
        if self._child is None:
            self._child = syscalls.start("sync", self._target)
        try:
            status = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return "it is being written"
        self._child = None
        if status < 0:
            return f"writing it was ended by signal {-status}"
        if status == syscalls.NOT_OPENED:
            return "its directory cannot be opened"
        if status:
            self.error = os.strerror(status)
        return self.wait_for_replies(deadline - time.monotonic())

    def wait_for_replies(self, seconds: float) -> str:
        """Wait until all requests are answered, which not every kernel does during a sync.

        Return why they are not; empty when they are, or when it is unknown.
        """
        deadline = time.monotonic() + seconds
        while count := fuse_connections.waiting(self._device):
            if time.monotonic() >= deadline:
                return f"{count} requests are unanswered"
            time.sleep(PAUSE_SECONDS)
        self.unverified = count is None
        return ""

    def is_timed_out(self, timeout_seconds: float) -> bool:
        """Whether this time has passed since the first refusal, which is counted from this call."""
        now = time.monotonic()
        if self._first_refusal is None:
            self._first_refusal = now
            return False
        return now - self._first_refusal >= timeout_seconds

    def cancel(self) -> None:
        """Stop waiting; the child dies when the kernel allows it."""
        if self._child is not None:
            self._child.kill()
            self._child = None

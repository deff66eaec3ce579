"""Written-behind data on its way to 3FS, before its mount is undone.

The kernel keeps what programs wrote and sends it later, so undoing a mount could lose it. It is
written out first, by a child that may wait for as long as that takes: calls look in on it, tell
their callers to ask again, and give up when the patience is over.
"""

from __future__ import annotations

import os
import subprocess
import time

from . import connections, syscalls

__all__ = ["Writing"]

PAUSE_SECONDS = 0.01


class Writing:
    """Of one mount, from the first call that asks for its end. One call at a time."""

    def __init__(self, target: str, device: str) -> None:
        self._target = target
        self._device = device
        self._child: subprocess.Popen[bytes] | None = None
        self._refused: float | None = None
        self.lost = ""
        """What the kernel said of data that it could not write and has dropped."""
        self.unseen = False
        """Whether nothing says if all that was sent has its answer."""

    def out(self, seconds: float) -> str:
        """Write out for so long; why it is not done yet, empty when it is."""
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
            self.lost = os.strerror(status)
        return self.answered(deadline - time.monotonic())

    def answered(self, seconds: float) -> str:
        """Wait for what was sent: not every kernel does, when it syncs.

        Why it is not all answered; empty when it is, and when nobody can know.
        """
        deadline = time.monotonic() + seconds
        while count := connections.waiting(self._device):
            if time.monotonic() >= deadline:
                return f"{count} requests have no answer yet"
            time.sleep(PAUSE_SECONDS)
        self.unseen = count is None
        return ""

    def is_over(self, patience_seconds: float) -> bool:
        """Whether callers have been told to ask again for so long; this one is told, if not."""
        now = time.monotonic()
        if self._refused is None:
            self._refused = now
            return False
        return now - self._refused >= patience_seconds

    def end(self) -> None:
        """Wait no longer; the child dies when the kernel lets it."""
        if self._child is not None:
            self._child.kill()
            self._child = None

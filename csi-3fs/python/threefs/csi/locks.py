"""One call at a time for a volume.

A second call waits a little, because callers repeat a call whose answer they lost; if the first is
still under way then, it is told to come back (ABORTED), as the specification asks.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from threefs.csi.errors import InFlight

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["WAIT_SECONDS", "VolumeLocks"]

WAIT_SECONDS = 0.5
"""Shorter than any caller's deadline, longer than a call that goes well usually takes."""


class VolumeLocks:
    """Locks by volume; a volume that nobody works on takes no memory."""

    def __init__(self, wait_seconds: float = WAIT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        self._held: dict[str, tuple[str, float]] = {}
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, volume: str, call: str) -> Iterator[None]:
        """Hold a volume for one call."""
        deadline = time.monotonic() + self._wait_seconds
        with self._changed:
            while volume in self._held:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    self._refuse(volume)
            self._held[volume] = (call, time.monotonic())
        try:
            yield
        finally:
            with self._changed:
                del self._held[volume]
                self._changed.notify_all()

    def _refuse(self, volume: str) -> None:
        if volume not in self._held:
            return
        call, since = self._held[volume]
        seconds = time.monotonic() - since
        raise InFlight(
            f"{call} of volume `{volume}` is under way for {seconds:.1f} s; try again when it ends"
        )

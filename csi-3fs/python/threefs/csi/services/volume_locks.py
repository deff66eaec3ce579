"""Locks that run one call at a time for a volume.

A second call waits briefly, because callers repeat calls whose reply they lost. If the first call
is still in progress then, the second returns ABORTED, as the specification requires.
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
"""Shorter than any caller's deadline, longer than a successful call usually takes."""


class VolumeLocks:
    """Locks by volume; a volume without a call in progress uses no memory."""

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
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
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
            f"{call} of volume `{volume}` has been in progress for {seconds:.1f} s; "
            "retry when it has ended"
        )

"""Exposed share: the part of a rank's time in which it waits for communication."""

from __future__ import annotations

import time

from hfreduce.waits import WAITS

__all__ = ["Exposure"]


class Exposure:
    """The exposed share since its creation, or since the last call of `share`.

    Waits for HFReduce's operations count, also for those that the script starts itself. A wait for
    a slow rank counts, too. Other backends and torch's own DistributedDataParallel are not seen.
    """

    def __init__(self) -> None:
        self._at, self._waited = time.monotonic(), WAITS.seconds

    def share(self) -> float:
        """Seconds of waiting / seconds since the last call: from 0, all hidden, to 1."""
        before, waited_before = self._at, self._waited
        self._at, self._waited = time.monotonic(), WAITS.seconds
        elapsed = self._at - before
        if elapsed <= 0:
            return 0.0
        return min(1.0, max(0.0, (self._waited - waited_before) / elapsed))

"""Time for which a script waits for operations: the communication that computation does not hide.

A wait counts from its call to its return, and not at all if its operations had ended before. Waits
of several threads at the same time count once. torch's own DistributedDataParallel waits in C++ and
is not seen here.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hfreduce import _native

__all__ = ["WAITS", "Waits"]


class Waits:
    """The waits of one process."""

    def __init__(self) -> None:
        self.observer: Callable[[Sequence[_native.Work], int, int], None] | None = None
        """Called after a wait with its operations, its start and its end, in nanoseconds of
        `time.monotonic_ns`; only while a trace is recorded."""
        self._lock = threading.Lock()
        self._waiting = 0
        self._since_ns = 0
        self._ended_ns = 0

    @property
    def seconds(self) -> float:
        """Time with at least one waiting thread so far, one that waits now included."""
        with self._lock:
            running_ns = time.monotonic_ns() - self._since_ns if self._waiting else 0
            return (self._ended_ns + running_ns) / 1e9

    @contextmanager
    def counted(self, operations: Sequence[_native.Work]) -> Iterator[None]:
        """Counts the time inside as a wait for these operations."""
        start_ns = time.monotonic_ns()
        with self._lock:
            self._waiting += 1
            if self._waiting == 1:
                self._since_ns = start_ns
        try:
            yield
        finally:
            end_ns = time.monotonic_ns()
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._ended_ns += max(0, end_ns - self._since_ns)
            observer = self.observer
            if observer is not None:
                observer(operations, start_ns, end_ns)


WAITS = Waits()
"""Of this process."""

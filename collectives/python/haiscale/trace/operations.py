"""Operations of HFReduce and bytes on the network, as the engine reports them.

The engine's flight recorder has the call and the end of each group's last operations; a thread
reads it before they are overwritten, and samples what was sent to other nodes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from hfreduce.group import OPEN
from hfreduce.sizes import size_text

from haiscale.trace.spans import Kind, Span

if TYPE_CHECKING:
    from hfreduce.group import Group

    from haiscale.trace.recorder import Recorder

__all__ = ["Watcher"]

SAMPLE_SECONDS: Final = 0.002
RECORDED: Final = 256
"""Operations of a group that the engine's flight record has."""
READ_AFTER: Final = 64
"""Operations after which it is read."""
JOIN_SECONDS: Final = 10.0


class _Watched:
    """One group: its operations that have ended since the start, and its bytes."""

    def __init__(self, group: Group) -> None:
        self.communicator = group.communicator
        self._before = self._count("sent_bytes")
        self._next = int(self.communicator.flight()["operations"])
        self._done: set[int] = set()
        self._counted = self._count("operations")
        self.lost = 0

    def _count(self, name: str) -> int:
        return int(self.communicator.stats()[name])

    def sent(self) -> int:
        """Bytes to other nodes along the trees since the start."""
        return self._count("sent_bytes") - self._before

    def is_due(self) -> bool:
        """Whether enough operations have ended to read the record."""
        return self._count("operations") - self._counted >= READ_AFTER

    def read(self, *, ends: int | None = None) -> list[tuple[int, Span]]:
        """Operations that have ended and were not read yet, with their numbers.

        With `ends`, those under way are returned too, up to that time.
        """
        self._counted = self._count("operations")
        record: dict[str, Any] = self.communicator.flight()
        called = int(record["operations"])
        oldest = max(self._next, called - RECORDED)
        self._forget(oldest)
        found = []
        for entry in record["entries"]:
            number, end = entry["record_id"], entry["finished_ns"] or ends
            if number < oldest or number in self._done or end is None:
                continue
            self._done.add(number)
            name = f"{entry['kind']} {size_text(entry['bytes'])}"
            span = Span(Kind.COLLECTIVE, name, entry["called_ns"], end, entry["bytes"])
            found.append((entry["sequence"], span))
        if ends is not None:
            self._forget(called)
        return found

    def _forget(self, until: int) -> None:
        """Counts operations before that one that were never read: they are overwritten."""
        self.lost += sum(number not in self._done for number in range(self._next, until))
        self._done.difference_update(range(self._next, until))
        self._next = until


class Watcher:
    """Watches the groups that are open at the start, on a thread, until `stop`.

    `recorder` gets the spans.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.numbered: list[tuple[int, Span]] = []
        """Operations with their numbers."""
        self._recorder = recorder
        self._groups = [_Watched(group) for group in OPEN]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="haiscale-trace", daemon=True)
        self._sent, self._sampled_at = 0, time.monotonic_ns()
        self._thread.start()

    @property
    def lost(self) -> int:
        """Operations that were overwritten before they were read."""
        return sum(group.lost for group in self._groups)

    def stop(self, ends: int) -> None:
        """Stops the thread; operations that are under way end at that time."""
        self._stopped.set()
        self._thread.join(JOIN_SECONDS)
        self._sample()
        for group in self._groups:
            self._keep(group.read(ends=ends))

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._sample()
            for group in self._groups:
                if group.is_due():
                    self._keep(group.read())

    def _sample(self) -> None:
        now, sent = time.monotonic_ns(), sum(group.sent() for group in self._groups)
        if sent > self._sent:
            new = sent - self._sent
            self._recorder.add(Kind.SENT, size_text(new), self._sampled_at, now, new)
        self._sampled_at, self._sent = now, sent

    def _keep(self, operations: list[tuple[int, Span]]) -> None:
        for number, span in operations:
            self._recorder.add(*span)
            self.numbered.append((number, span))

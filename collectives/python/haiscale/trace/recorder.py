"""The recording of this process, if there is one; training layers add their spans to it."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from haiscale.trace.spans import Span, Wait

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from hfreduce._native import Work

    from haiscale.trace.spans import Kind

__all__ = ["SPANS_MAX", "Recorder", "recording", "set_recording", "span"]

SPANS_MAX: Final = 100_000
"""Of one rank; about 15 MB of its file. More are counted, not kept."""

_NOTHING: Final = nullcontext()
_current: Recorder | None = None


class Recorder:
    """Spans of this process, at most SPANS_MAX; any thread may add some."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        """Waits that have no name yet."""
        self.dropped = 0
        self._limit = SPANS_MAX

    def add(self, kind: Kind, name: str, start: int, end: int, size: int = 0) -> None:
        """Adds a span, in nanoseconds of `time.monotonic_ns`, with a number of bytes."""
        if self._has_room():
            self.spans.append(Span(kind, name, start, end, size))

    def add_wait(self, operations: Sequence[Work], start: int, end: int) -> None:
        """Adds a wait for operations; an observer of `hfreduce.waits`."""
        if self._has_room():
            number = operations[-1].sequence if operations else -1
            self.waits.append(Wait(start, end, number))

    def _has_room(self) -> bool:
        if len(self.spans) + len(self.waits) < self._limit:
            return True
        self.dropped += 1
        return False

    @contextmanager
    def timed(self, kind: Kind, name: str) -> Iterator[None]:
        """Adds the time inside."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(kind, name, start, time.monotonic_ns())


def recording() -> Recorder | None:
    """The recorder of a recording under way."""
    return _current


def set_recording(recorder: Recorder | None) -> None:
    """Starts or, with None, ends to add spans."""
    global _current  # noqa: PLW0603  (one recording of a process at a time)
    _current = recorder


def span(kind: Kind, name: str) -> AbstractContextManager[None]:
    """Adds the time inside to the recording; without one, does nothing."""
    return _NOTHING if _current is None else _current.timed(kind, name)

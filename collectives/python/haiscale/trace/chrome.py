"""Files of traces, in Chrome's Trace Event Format, for chrome://tracing and Perfetto as well.

A rank's file is ``rank-00003.json``. `traceEvents` has the spans in microseconds since the meeting
of the ranks, and `otherData` what `RankTrace` has besides. Files are read with suspicion: every
field is checked, and an error names file, field and value.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, Final

from haiscale.trace.recorder import SPANS_MAX
from haiscale.trace.spans import Kind, Peer, RankTrace, Span, aligned, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["TraceError", "merged", "parse", "read", "write"]

FORMAT: Final = "haiscale-trace"
VERSION: Final = 2
FILE_BYTES_MAX: Final = 1 << 28
NAME_CHARACTERS_MAX: Final = 200
RANKS_MAX: Final = 1 << 20
NANOSECONDS_MAX: Final = 10**15
"""Eleven days: longer spans are damage."""
BYTES_MAX: Final = 1 << 62
PATTERN: Final = "rank-*.json"

LANES: Final = {
    Kind.STEP: (0, "steps"),
    Kind.FORWARD: (1, "compute"),
    Kind.BACKWARD: (1, "compute"),
    Kind.OPTIMIZER: (1, "compute"),
    Kind.WAIT: (2, "exposed"),
    Kind.SENT: (3, "sent to other nodes"),
    Kind.COLLECTIVE: (4, "collectives"),
}
"""Number and name of the thread that shows a kind; collectives that overlap have further ones."""


class TraceError(ValueError):
    """A trace that cannot be used: which file, what is wrong with it, and what to do."""


def document(trace: RankTrace) -> dict[str, Any]:
    """The file of one rank."""
    other = {name: getattr(trace, name) for name in _FIELDS}
    other["peers"] = [peer._asdict() for peer in trace.peers]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "version": VERSION, **other},
        "traceEvents": list(_events(trace)),
    }


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One document of all ranks, on one clock: a process for each rank."""
    events = [event for trace in aligned(traces) for event in _events(trace)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write(folder: Path, trace: RankTrace) -> Path:
    """Writes the file of a rank, whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{trace.rank:05}.json"
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        unfinished.write_text(json.dumps(document(trace)), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def read(folder: Path) -> list[RankTrace]:
    """The traces of a folder on one clock, by rank.

    Raises:
        TraceError: There is none, a file is damaged, or the files are of different recordings.
        OSError: A file cannot be read.
    """
    paths = sorted(folder.glob(PATTERN))
    if not paths:
        raise TraceError(f"{folder}: no {PATTERN}: pass the folder that was given to record()")
    traces: dict[int, RankTrace] = {}
    for path in paths:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise TraceError(f"{path}: larger than {FILE_BYTES_MAX} bytes: trace fewer steps")
        trace = parse(path.read_text(encoding="utf-8", errors="replace"), str(path))
        first = next(iter(traces.values()), trace)
        if (trace.run, trace.world_size) != (first.run, first.world_size):
            raise TraceError(
                f"{path}: is of another recording than {paths[0]}: remove the files of one of them"
            )
        if trace.rank in traces:
            raise TraceError(f"{path}: rank {trace.rank} has another file: remove one of them")
        traces[trace.rank] = trace
    return aligned(list(traces.values()))


def parse(text: str, source: str) -> RankTrace:
    """The trace in a file's text. Raises `TraceError`, which names `source`."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}: not JSON: {error}: record it again") from error
    root = _Fields(source, body)
    other = root.part("otherData")
    if other.body.get("format") != FORMAT or other.body.get("version") != VERSION:
        raise TraceError(
            f"{source}: format {other.body.get('format')!r:.80} of version "
            f"{other.body.get('version')!r:.80}: expected {FORMAT} of version {VERSION}"
        )
    size = other.integer("world_size", 1, RANKS_MAX)
    events = root.items("traceEvents", 2 * SPANS_MAX)
    return RankTrace(
        run=other.text("run"),
        rank=other.integer("rank", 0, size - 1),
        world_size=size,
        node=other.text("node"),
        machine=other.text("machine"),
        origin=other.integer("origin", 0, BYTES_MAX),
        spans=tuple(_spans(source, events)),
        peers=tuple(_peers(other, size)),
        dropped=other.integer("dropped", 0, BYTES_MAX),
        lost=other.integer("lost", 0, BYTES_MAX),
    )


_FIELDS: Final = ("run", "rank", "world_size", "node", "machine", "origin", "dropped", "lost")


def _events(trace: RankTrace) -> Iterator[dict[str, Any]]:
    pid = trace.rank
    yield _name("process_name", pid, 0, f"rank {trace.rank} on {trace.node}")
    overlapping = rows([span for span in trace.spans if span.kind is Kind.COLLECTIVE])
    named = {*LANES.values()} | {(4 + row, "collectives") for row in range(len(overlapping))}
    for tid, name in sorted(named):
        yield _name("thread_name", pid, tid, name)
    for span in trace.spans:
        if span.kind is not Kind.COLLECTIVE:
            yield _event(span, pid, LANES[span.kind][0])
    for row, spans in enumerate(overlapping):
        yield from (_event(span, pid, 4 + row) for span in spans)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name[:NAME_CHARACTERS_MAX],
        "cat": str(span.kind),
        "pid": pid,
        "tid": tid,
        "ts": span.start / 1000,
        "dur": (span.end - span.start) / 1000,
        "args": {"bytes": span.bytes},
    }


class _Fields:
    """The fields of an object, each checked; errors name file and field."""

    def __init__(self, source: str, body: Any) -> None:
        if not isinstance(body, dict):
            raise TraceError(f"{source}: {body!r:.80}: expected an object: record it again")
        self.source, self.body = source, body

    def part(self, name: str) -> _Fields:
        """An object."""
        return _Fields(f"{self.source}: {name}", self.body.get(name))

    def items(self, name: str, most: int) -> list[Any]:
        """A list of bounded length."""
        value = self.body.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise self._bad(name, f"a list of at most {most}")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer in a range."""
        value = self.body.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, f"an integer from {low} to {high}")
        return value

    def nanoseconds(self, name: str) -> int:
        """Microseconds, which may be negative, as nanoseconds."""
        value = self.body.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(name, "a number")
        if not (math.isfinite(value) and abs(value) * 1000 <= NANOSECONDS_MAX):
            raise self._bad(name, f"a number up to {NANOSECONDS_MAX // 1000}")
        return round(value * 1000)

    def text(self, name: str) -> str:
        """A string of bounded length."""
        value = self.body.get(name)
        if not isinstance(value, str) or len(value) > NAME_CHARACTERS_MAX:
            raise self._bad(name, f"a string of at most {NAME_CHARACTERS_MAX} characters")
        return value

    def _bad(self, name: str, expected: str) -> TraceError:
        value = self.body.get(name)
        return TraceError(f"{self.source}: {name} is {value!r:.80}: expected {expected}")


def _peers(other: _Fields, world_size: int) -> Iterator[Peer]:
    for index, entry in enumerate(other.items("peers", world_size)):
        fields = _Fields(f"{other.source}: peers[{index}]", entry)
        yield Peer(
            rank=fields.integer("rank", 0, world_size - 1),
            sent=fields.integer("sent", 0, BYTES_MAX),
            taken=fields.integer("taken", 0, BYTES_MAX),
        )


def _spans(source: str, events: Sequence[Any]) -> Iterator[Span]:
    for index, event in enumerate(events):
        fields = _Fields(f"{source}: traceEvents[{index}]", event)
        if fields.body.get("ph") != "X":
            continue
        kind = fields.text("cat")
        if kind not in set(Kind):
            raise TraceError(f"{fields.source}: cat is {kind!r}: expected {', '.join(Kind)}")
        start, length = fields.nanoseconds("ts"), fields.nanoseconds("dur")
        if length < 0:
            raise TraceError(f"{fields.source}: dur is {length / 1000}: expected at least 0")
        size = fields.part("args").integer("bytes", 0, BYTES_MAX)
        yield Span(Kind(kind), fields.text("name"), start, start + length, size)

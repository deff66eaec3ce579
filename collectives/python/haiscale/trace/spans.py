"""Spans of a traced step, and what follows from them. Pure functions; times in nanoseconds."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Interval",
    "Kind",
    "Peer",
    "RankTrace",
    "Span",
    "Wait",
    "aligned",
    "causes",
    "exposed_share",
    "named",
    "of_kind",
    "overlap",
    "rows",
    "union",
]

Interval = tuple[int, int]
"""Start and end, in nanoseconds."""


class Kind(StrEnum):
    """What a span is."""

    STEP = "step"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    WAIT = "wait"
    """The script's thread waits for an operation: exposed time."""
    COLLECTIVE = "collective"
    """An operation of HFReduce from its call to its end."""
    SENT = "sent"
    """Bytes that were sent along the trees to other nodes meanwhile."""


class Span(NamedTuple):
    """One thing that a rank did."""

    kind: Kind
    name: str
    start: int
    end: int
    bytes: int = 0


class Wait(NamedTuple):
    """A wait for operations, of which the last one has this number in its group."""

    start: int
    end: int
    number: int


class Peer(NamedTuple):
    """Payload bytes between a rank and another one. Each byte is counted by one of the two."""

    rank: int
    """The other one."""
    sent: int = 0
    """Bytes that the rank has sent to it, along the trees and in messages."""
    taken: int = 0
    """Bytes that the rank has taken from its memory, inside the node."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one rank. Times count from the `origin` of its machine's clock."""

    run: str
    """Equal on all ranks of a recording."""
    rank: int
    world_size: int
    node: str
    machine: str
    """Ranks with equal ones share a clock."""
    origin: int
    """When all ranks had met, on the machine's clock."""
    spans: tuple[Span, ...]
    peers: tuple[Peer, ...] = ()
    dropped: int = 0
    """Spans that the limit left out."""
    lost: int = 0
    """Operations that the engine's flight recorder no longer had."""


def of_kind(spans: Iterable[Span], *kinds: Kind) -> list[Span]:
    """The spans of some kinds."""
    return [span for span in spans if span.kind in kinds]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals, ascending; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    """Common time of two unions."""
    total, i, j = 0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def exposed_share(spans: Sequence[Span]) -> float:
    """Share of the steps' time with a wait; 0 where no step was recorded."""
    steps = union((span.start, span.end) for span in of_kind(spans, Kind.STEP))
    waits = union((span.start, span.end) for span in of_kind(spans, Kind.WAIT))
    length = sum(end - start for start, end in steps)
    return overlap(waits, steps) / length if length else 0.0


def causes(spans: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds of waiting by the name of what was waited for, the longest first."""
    totals: dict[str, int] = {}
    for span in of_kind(spans, Kind.WAIT):
        totals[span.name] = totals.get(span.name, 0) + span.end - span.start
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in as few rows as possible, so that those of one row do not overlap."""
    placed: list[list[Span]] = []
    ends: list[tuple[int, int]] = []  # a heap of the end of each row, and the row
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        if ends and ends[0][0] <= span.start:
            row = heapq.heapreplace(ends, (span.end, ends[0][1]))[1]
            placed[row].append(span)
        else:
            heapq.heappush(ends, (span.end, len(placed)))
            placed.append([span])
    return placed


def aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces on one clock, by rank.

    Ranks leave the meeting one after the other, but none before all have come: on each machine the
    first one to leave stands for the meeting. Machines differ by the time in which it ends.
    """
    met: dict[str, int] = {}
    for trace in traces:
        met[trace.machine] = min(trace.origin, met.get(trace.machine, trace.origin))
    result = []
    for trace in sorted(traces, key=lambda each: each.rank):
        late = trace.origin - met[trace.machine]
        spans = tuple(
            span._replace(start=span.start + late, end=span.end + late) for span in trace.spans
        )
        result.append(replace(trace, origin=met[trace.machine], spans=spans))
    return result


def named(waits: Sequence[Wait], operations: Sequence[tuple[int, Span]]) -> list[Span]:
    """Spans of waits, named by the operation of that number that ended last before the wait did.

    `operations` come with their numbers, in any order. Groups number their operations
    independently of each other, so several may have the same. If none ended before, the first one
    to end gives the name: the two clock readings are apart.
    """
    by_number: dict[int, list[Span]] = {}
    for number, span in sorted(operations, key=lambda each: each[1].end):
        by_number.setdefault(number, []).append(span)
    spans = []
    for start, end, number in waits:
        known = by_number.get(number, [])
        place = bisect_right([span.end for span in known], end)
        name = known[max(0, place - 1)].name if known else "unknown operation"
        spans.append(Span(Kind.WAIT, name, start, end))
    return spans

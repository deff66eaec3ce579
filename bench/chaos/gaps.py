"""Times without a completed operation. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bench.chaos.history import Record

__all__ = ["KINDS", "Gaps", "gaps"]

KINDS = ("change", "lookup", "write", "read")


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of one kind of operation, in seconds, within a span of time."""

    all_clients: float
    """Longest time in which no client completed one."""
    one_client: float
    """Longest time in which one client completed none, of all its workers."""
    operation: float
    """Longest operation that was open in this span."""


def gaps(
    records: Iterable[Record], client_of: Mapping[int, int], start_ns: int, end_ns: int
) -> dict[str, Gaps]:
    """Gaps of each kind between two times, for the workers of `client_of`."""
    ends: dict[str, dict[int, list[int]]] = {kind: {} for kind in KINDS}
    longest = dict.fromkeys(KINDS, 0)
    for record in records:
        client = client_of.get(record.worker)
        operation = record.operation
        if client is None or operation.result is None or operation.returned_ns < start_ns:
            continue
        ends[record.kind].setdefault(client, [])
        if operation.returned_ns <= end_ns:
            ends[record.kind][client].append(operation.returned_ns)
        if operation.called_ns <= end_ns:
            duration = operation.returned_ns - operation.called_ns
            longest[record.kind] = max(longest[record.kind], duration)
    return {
        kind: Gaps(
            all_clients=_longest([t for times in each.values() for t in times], start_ns, end_ns),
            one_client=max(_longest(times, start_ns, end_ns) for times in each.values()),
            operation=longest[kind] / 1e9,
        )
        for kind, each in ends.items()
        if each
    }


def _longest(times: list[int], start_ns: int, end_ns: int) -> float:
    ordered = [start_ns, *sorted(times), end_ns]
    return max(after - before for before, after in itertools.pairwise(ordered)) / 1e9

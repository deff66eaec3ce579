"""Victim search: the cheapest set of jobs that frees enough nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Above this size a greedy search replaces the exact one, so that a decision takes milliseconds.
_CELLS_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that may be preempted, the cost of that, and how many required nodes it frees."""

    job: str
    cost_node_ms: int
    gain: int


def cheapest_cover(candidates: Sequence[Candidate], need: int) -> tuple[Candidate, ...] | None:
    """Of all sets that free `need` nodes the cheapest one, then the smallest one."""
    useful = [candidate for candidate in candidates if candidate.gain > 0]
    if sum(candidate.gain for candidate in useful) < need:
        return None
    if need <= 0:
        return ()
    if len(useful) * need > _CELLS_MAX:
        return cheapest_set(
            useful, lambda selection: sum(candidate.gain for candidate in selection) >= need
        )
    # cover[k]: the best set that frees at least k nodes, as (cost, size, positions).
    cover: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ())] + [None] * need
    for position, item in enumerate(useful):
        for count in range(need, 0, -1):
            rest = cover[max(0, count - item.gain)]
            if rest is None:
                continue
            better = (rest[0] + item.cost_node_ms, rest[1] + 1, (*rest[2], position))
            previous = cover[count]
            if previous is None or better < previous:
                cover[count] = better
    best = cover[need]
    assert best is not None, "the sum of gains covers the need"
    return tuple(useful[position] for position in best[2])


def cheapest_set(
    candidates: Sequence[Candidate], enough: Callable[[Sequence[Candidate]], bool]
) -> tuple[Candidate, ...] | None:
    """A small set for which `enough` holds: add the cheapest, then drop the most expensive."""
    selection: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda item: item.cost_node_ms):
        if enough(selection):
            break
        selection.append(candidate)
    if not enough(selection):
        return None
    for candidate in sorted(selection, key=lambda candidate: -candidate.cost_node_ms):
        without = [other for other in selection if other is not candidate]
        if enough(without):
            selection = without
    return tuple(selection)


__all__ = ["Candidate", "cheapest_cover", "cheapest_set"]

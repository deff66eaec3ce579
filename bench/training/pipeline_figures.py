"""Rows of the pipeline benchmark, from the seconds of each round. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.rows import Row, row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TORCH", "bubble_rows", "chunks_of", "ideal_seconds", "theory", "wire_rows"]

TORCH: Final = "torch 1F1B, Gloo"
EAGER: Final = "Eager1F1B"
POINTS: Final = {"1F1B": 1.5, "Interleaved1F1B": 2.0}
"""Goals of bubbles above the theory's, in points of a hundred."""
ZERO_BUBBLE_GOAL: Final = 4.0


def chunks_of(variant: str) -> int:
    """Stages of a rank."""
    return 2 if variant in {"Interleaved1F1B", "ZBVZeroBubble"} else 1


def work_seconds(microbatches: int, layer_seconds: float) -> float:
    """Computation of a rank in a step: two layers with three parts each."""
    return microbatches * 2 * 3 * layer_seconds


def theory(variant: str, ranks: int, microbatches: int) -> float:
    """The bubble of equal stages without transfers, in percent of the step."""
    units = {"Interleaved1F1B": 2 * microbatches, "ZBVZeroBubble": 6 * microbatches}
    work = units.get(variant, microbatches)
    return 100 * (ranks - 1) / (work + ranks - 1)


def ideal_seconds(ranks: int, microbatches: int, layer_seconds: float) -> float:
    """A step of 1F1B without transfers."""
    return work_seconds(microbatches + ranks - 1, layer_seconds)


def bubble_rows(
    ranks: int, microbatches: int, layer_seconds: float, seconds: Mapping[str, Sequence[float]]
) -> list[Row]:
    """The bubble of each schedule: the share of the step in which a rank does not compute."""
    work = work_seconds(microbatches, layer_seconds)
    rows = []
    for name, values in seconds.items():
        expected = theory("1F1B" if name == TORCH else name, ranks, microbatches)
        goal = expected + POINTS[name] if name in POINTS else None
        if name == "ZBVZeroBubble":
            goal = ZERO_BUBBLE_GOAL
        bubbles = [100 * (1 - work / value) for value in values]
        rows.append(row(f"{name}: bubble (theory {expected:.1f} %)", "%", bubbles, goal))
    return rows


def wire_rows(
    title: str,
    ideal: float,
    seconds: Mapping[str, Sequence[float]],
    unlimited: Mapping[str, Sequence[float]],
    goal: float,
) -> list[Row]:
    """Steps on links with a limit.

    They are multiples of 1F1B without transfers, computed from the times of the layers, of the same
    schedule over links without a limit, and of torch's.
    """
    rows = []
    for name, values in seconds.items():
        ratios = [value / ideal for value in values]
        rows.append(row(f"{title}: {name} / ideal", "of", ratios))
    for name, values in unlimited.items():
        ratios = [own / free for own, free in zip(seconds[name], values, strict=True)]
        wanted = goal if name == EAGER else None
        rows.append(row(f"{title}: {name} / no limit", "of", ratios, wanted))
    if TORCH in seconds and EAGER in seconds:
        pairs = zip(seconds[EAGER], seconds[TORCH], strict=True)
        rows.append(row(f"{title}: {EAGER} / {TORCH}", "of", [own / peer for own, peer in pairs]))
    return rows

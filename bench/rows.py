"""Result rows: figures and their goals. Pure."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Row", "absent", "row", "table", "times"]

_NAME_WIDTH, _FIGURE_WIDTH, _SPREAD_WIDTH, _GOAL_WIDTH = 53, 12, 17, 11


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: median, minimum and maximum of its rounds, and its goal."""

    name: str
    unit: str
    """µs, ms, MiB, or a ratio: "x" (as often) or "of limit"."""
    median: float | None
    """None: not measured, for the reason in `note`."""
    low: float | None
    high: float | None
    rounds: int
    goal: float | None
    more: bool
    """Whether the goal is a minimum; otherwise it is a maximum."""
    note: str = ""
    """The reason for a missing figure, or the peer's configuration."""

    @property
    def reached(self) -> bool | None:
        """Whether the goal was reached; None without a goal."""
        if self.median is None or self.goal is None:
            return None
        return self.median >= self.goal if self.more else self.median <= self.goal

    def document(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return asdict(self) | {"reached": self.reached}


def row(
    name: str, unit: str, values: Sequence[float], goal: float | None = None, *, more: bool = False
) -> Row:
    """The values of all rounds."""
    middle = statistics.median(values)
    return Row(name, unit, middle, min(values), max(values), len(values), goal, more)


def times(
    name: str,
    own: Sequence[float],
    peer: Sequence[float],
    goal: float | None = None,
    *,
    note: str = "",
) -> Row:
    """Speedup over a peer, computed for each round so that slow rounds affect both."""
    ratios = [t / o for o, t in zip(own, peer, strict=True)]
    return replace(row(name, "x", ratios, goal, more=True), note=note)


def absent(name: str, why: str, goal: float | None = None, *, more: bool = False) -> Row:
    """A row for a figure that was not measured."""
    return Row(name, "", None, None, None, 0, goal, more, why)


def table(rows: Iterable[Row]) -> str:
    """Formats the table in 100 columns."""
    head = (
        f"{'figure':{_NAME_WIDTH}}{'median':>{_FIGURE_WIDTH}}{'least … most':>{_SPREAD_WIDTH}}"
        f"{'goal':>{_GOAL_WIDTH}}  ok"
    )
    return "\n".join([head, *(_line(item) for item in rows)])


def _line(entry: Row) -> str:
    name = entry.name[:_NAME_WIDTH]
    goal = "" if entry.goal is None else f"{'≥' if entry.more else '≤'} {entry.goal:g}"
    if entry.median is None or entry.low is None or entry.high is None:
        room = _FIGURE_WIDTH + _SPREAD_WIDTH
        return f"{name:{_NAME_WIDTH}}{entry.note[:room]:>{room}}{goal:>{_GOAL_WIDTH}}   -"
    word = {True: "yes", False: "NO", None: ""}[entry.reached]
    figure = f"{_digits(entry.median)} {entry.unit}"
    spread = f"{_digits(entry.low)} … {_digits(entry.high)}"
    return (
        f"{name:{_NAME_WIDTH}}{figure:>{_FIGURE_WIDTH}}{spread:>{_SPREAD_WIDTH}}"
        f"{goal:>{_GOAL_WIDTH}} {word:>3}"
    )


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

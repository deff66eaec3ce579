"""Figures: values of several rounds against a bound or against a peer of the same run. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Figure", "document", "table"]

_WIDTH: Final = 79


@dataclass(slots=True)
class Figure:
    """One figure: the operator's values, a peer's if there is one, and the goal.

    The bound is the largest value that is good, or the smallest one where `more` is better. With
    `of_peer` it bounds the ratio of the operator's median to the peer's.
    """

    name: str
    unit: str
    bound: float | None = None  # None: reported without a goal
    more: bool = False
    of_peer: bool = False
    values: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def median(self) -> float:
        """Median of the operator's rounds."""
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        """Ratio of the medians, the operator's over the peer's; None without a peer."""
        if not self.peer or not self.values:
            return None
        below = statistics.median(self.peer)
        return self.median / below if below else None

    @property
    def judged(self) -> float | None:
        """The value that is compared with the bound."""
        if not self.values:
            return None
        return self.ratio if self.of_peer else self.median

    @property
    def good(self) -> bool | None:
        """Whether the bound holds; None: nothing to judge."""
        value = self.judged
        if self.bound is None or value is None:
            return None
        # Two digits, as the table shows them: a ratio of 0.502 is a half.
        value = round(value, 2)
        return value >= self.bound if self.more else value <= self.bound

    def to_object(self) -> dict[str, Any]:
        """The figure as JSON."""
        return {
            "unit": self.unit,
            "ours": self.values,
            "peer": self.peer,
            "median": self.median if self.values else None,
            "ratio": self.ratio,
            "bound": self.bound,
            "bound_is_of": "ratio to the peer" if self.of_peer else "median",
            "more_is_better": self.more,
            "good": self.good,
            "note": self.note,
        }


def document(config: dict[str, Any], figures: list[Figure]) -> dict[str, Any]:
    """The content of the JSON file."""
    return {"config": config, "figures": {figure.name: figure.to_object() for figure in figures}}


def table(figures: list[Figure]) -> list[str]:
    """Lines of at most 79 characters."""
    lines = [f"{'figure':<41}{'ours':>9}{'peer':>9}{'ratio':>7}{'asked':>8}     "]
    for figure in figures:
        if not figure.values:
            continue
        peer = _number(statistics.median(figure.peer)) if figure.peer else ""
        ratio = f"{figure.ratio:.2f}" if figure.ratio is not None else ""
        goal = ""
        if figure.bound is not None:
            goal = f"{'≥' if figure.more else '≤'}{figure.bound:g}{'×' if figure.of_peer else ''}"
        verdict = {True: "yes", False: "NO", None: ""}[figure.good]
        label = f"{figure.name}, {figure.unit}"
        if len(label) > 40:
            label = f"{label[:39]}…"
        line = f"{label:<41}{_number(figure.median):>9}{peer:>9}{ratio:>7}{goal:>8} {verdict}"
        lines.append(line.rstrip())
    assert all(len(line) <= _WIDTH for line in lines), lines
    return [line.rstrip() for line in lines]


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

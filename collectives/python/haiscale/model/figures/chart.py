"""Line charts over numbers of GPUs as SVG, without a library: panels side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Line", "Panel", "svg"]

PLOT_WIDTH, PLOT_HEIGHT, LEFT, NAMES, TOP, BOTTOM = 400, 300, 62, 150, 112, 62
NAME_HEIGHT: Final = 16
"""Least distance of two rows of text."""
INK, FAINT, GRID = "#1a202c", "#4a5568", "#e2e8f0"


@dataclass(frozen=True, slots=True)
class Line:
    """A line with one value for each tick of the x axis."""

    name: str
    colour: str
    values: Sequence[float]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot."""

    title: str
    y_name: str
    ticks: Sequence[int]
    lines: Sequence[Line]
    marks: Mapping[int, float] = field(default_factory=dict)
    """Values of the paper, by tick."""
    is_logarithmic: bool = False

    def x(self, index: int) -> float:
        """Horizontal position of a tick in the plot."""
        return 20 + (PLOT_WIDTH - 40) * index / max(len(self.ticks) - 1, 1)

    def limits(self) -> tuple[float, float]:
        """Ends of the y axis."""
        values = [value for line in self.lines for value in line.values] + [*self.marks.values()]
        if not self.is_logarithmic:
            return 0.0, max(values) * 1.1
        return min(values) / 1.2, max(values) * 1.2

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        low, high = self.limits()
        if self.is_logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        return TOP + PLOT_HEIGHT * (1 - (value - low) / (high - low))

    def y_ticks(self) -> list[float]:
        """Values at the lines of the grid."""
        low, high = self.limits()
        if self.is_logarithmic:
            powers = range(floor(log10(low)), ceil(log10(high)) + 1)
            ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [tick for tick in ticks if low <= tick <= high]
        step = 10.0 ** floor(log10(high / 2))
        step *= next(factor for factor in (1, 2, 5, 10) if high / (factor * step) <= 8)
        return [step * index for index in range(floor(high / step) + 1)]


def svg(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """The panels as an SVG document."""
    panel_width = LEFT + PLOT_WIDTH + NAMES
    width, height = panel_width * len(panels), TOP + PLOT_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13" role="img" '
        f'aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(24, 34, title, INK, 'font-size="20" font-weight="bold"'),
        _text(24, 56, subtitle, FAINT),
    ]
    for index, panel in enumerate(panels):
        parts += [
            f'<g transform="translate({panel_width * index + LEFT} 0)">',
            *_axes(panel),
            *(part for line in panel.lines for part in _line(panel, line)),
            *_marks(panel),
            *_names(panel),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>\n"])


def _axes(panel: Panel) -> Iterable[str]:
    yield _text(0, TOP - 18, panel.title, INK, 'font-size="15" font-weight="bold"')
    yield _text(-8, TOP - 18, panel.y_name, FAINT, 'text-anchor="end"')
    for tick in panel.y_ticks():
        y = panel.y(tick)
        yield (
            f'<line x1="0" y1="{y:.1f}" x2="{PLOT_WIDTH}" y2="{y:.1f}" '
            f'stroke="{FAINT if tick == 0 else GRID}"/>'
        )
        yield _text(-8, y + 4.5, f"{tick:g}", FAINT, 'text-anchor="end"')
    for index, gpus in enumerate(panel.ticks):
        x = panel.x(index)
        yield _text(x, TOP + PLOT_HEIGHT + 20, f"{gpus}", FAINT, 'text-anchor="middle"')
    below = TOP + PLOT_HEIGHT + 44
    yield _text(PLOT_WIDTH / 2, below, "GPUs", FAINT, 'text-anchor="middle"')


def _line(panel: Panel, line: Line) -> Iterable[str]:
    points = [(panel.x(n), panel.y(value)) for n, value in enumerate(line.values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 5"' if line.is_dashed else ""
    yield (
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5" '
        f'stroke-linejoin="round"{dashes}/>'
    )
    for (x, y), value in zip(points, line.values, strict=True):
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}" stroke="#ffffff" '
            f'stroke-width="1.2"><title>{escape(line.name)}: {value:.3f}</title></circle>'
        )


def _marks(panel: Panel) -> Iterable[str]:
    for gpus, value in panel.marks.items():
        x, y = panel.x(panel.ticks.index(gpus)), panel.y(value)
        yield (
            f'<path d="M {x:.1f} {y - 8:.1f} l 8 8 l -8 8 l -8 -8 z" fill="none" stroke="{INK}" '
            f'stroke-width="1.8"><title>paper: {value:g}</title></path>'
        )
    if panel.marks:
        yield _text(PLOT_WIDTH - 8, TOP + 16, "◇ paper", INK, 'text-anchor="end"')


def _names(panel: Panel) -> Iterable[str]:
    """Each name next to the end of its line; names of lines that end close together are moved."""
    lowest = float("-inf")
    for line in sorted(panel.lines, key=lambda line: panel.y(line.values[-1])):
        y = max(panel.y(line.values[-1]) + 4.5, lowest + 2 * NAME_HEIGHT + 2)
        lowest = y
        yield _text(PLOT_WIDTH + 8, y, line.name, line.colour, 'font-weight="bold"')
        value = f"{line.values[-1]:.3g}"
        yield _text(PLOT_WIDTH + 8, y + NAME_HEIGHT, value, line.colour, 'font-size="12"')


def _text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {more}>{escape(words)}</text>'

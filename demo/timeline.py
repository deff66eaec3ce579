"""Timeline: draws the attempts on their nodes over time, as one SVG file without a library.

Rows are nodes by zone, then storage services. Bars are attempts of jobs; marks are events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["checkpoint", "suspend", "kill", "resync"]

PALETTE = ["#3b6fb6", "#d9822b", "#5a9e6f", "#8d6cab"]
"""Job colours, in order of first appearance; they differ in lightness too."""
MARK_COLOURS: dict[Kind, str] = {
    "checkpoint": "#1d3557",
    "suspend": "#d9822b",
    "kill": "#c1121f",
    "resync": "#2a7f62",
}
MARK_WORDS: dict[Kind, str] = {
    "checkpoint": "checkpoint durable",
    "suspend": "asked to make room",
    "kill": "killed",
    "resync": "resynced, serving again",
}

LEFT, RIGHT, TOP, ROW, BAR = 150, 30, 78, 26, 16
PLOT_WIDTH = 1000


@dataclass(frozen=True)
class Bar:
    """A job's attempt on a row from `start` to `end`, in seconds since the start."""

    row: str
    job: str
    attempt: int
    start: float
    end: float


@dataclass(frozen=True)
class Mark:
    """An event on a row."""

    row: str
    kind: Kind
    at: float
    text: str


@dataclass
class Timeline:
    """What was seen. `groups` lists (title, rows) from top to bottom."""

    groups: list[tuple[str, list[str]]]
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def svg(self, title: str, subtitle: str) -> str:
        """The picture as an SVG document."""
        return _Picture(self, title, subtitle).draw()


class _Picture:
    def __init__(self, timeline: Timeline, title: str, subtitle: str) -> None:
        self.timeline, self.title, self.subtitle = timeline, title, subtitle
        times = [bar.end for bar in timeline.bars] + [mark.at for mark in timeline.marks]
        self.seconds = max([1.0, *times])
        jobs = dict.fromkeys(bar.job for bar in timeline.bars)
        self.colours = {job: PALETTE[i % len(PALETTE)] for i, job in enumerate(jobs)}
        self.middle: dict[str, float] = {}
        self.parts: list[str] = []

    def draw(self) -> str:
        height = self._rows()
        self._axis(height)
        for bar in self.timeline.bars:
            self._bar(bar)
        for mark in self.timeline.marks:
            self._mark(mark)
        self._head()
        self._legend(height + 44)
        width, total = LEFT + PLOT_WIDTH + RIGHT, height + 70
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" '
                f'viewBox="0 0 {width} {total}" font-size="12" '
                'font-family="system-ui, sans-serif">',
                f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )

    def _x(self, seconds: float) -> float:
        return round(LEFT + PLOT_WIDTH * seconds / self.seconds, 1)

    def _text(self, x: float, y: float, text: str, extra: str = "") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" {extra}>{escape(text)}</text>')

    def _head(self) -> None:
        self._text(20, 28, self.title, 'font-size="18" font-weight="600" fill="#111"')
        self._text(20, 48, self.subtitle, 'fill="#555"')

    def _rows(self) -> float:
        """Draws the groups' bands; returns the y of the plot's end."""
        y = float(TOP)
        for number, (group, rows) in enumerate(self.timeline.groups):
            band = "#f4f6f9" if number % 2 == 0 else "#fbfbfd"
            self.parts.append(
                f'<rect x="0" y="{y}" width="{LEFT + PLOT_WIDTH + RIGHT}" '
                f'height="{ROW * len(rows)}" fill="{band}"/>'
            )
            self._text(20, y + 17, group, 'font-weight="600" fill="#333"')
            for row in rows:
                self.middle[row] = y + ROW / 2
                self._text(LEFT - 12, y + 17, row, 'text-anchor="end" fill="#333"')
                y += ROW
        return y

    def _axis(self, height: float) -> None:
        step = next(
            s
            for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 900, 3600, 10**9)
            if self.seconds / s <= 14
        )
        for tick in range(0, int(self.seconds) + 1, step):
            x = self._x(tick)
            self.parts.append(
                f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{height}" stroke="#dfe3e8"/>'
            )
            self._text(x, height + 16, f"{tick} s", 'text-anchor="middle" fill="#555"')

    def _bar(self, bar: Bar) -> None:
        x, y = self._x(bar.start), self.middle[bar.row] - BAR / 2
        width = max(1.5, self._x(bar.end) - x)
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{round(width, 1)}" height="{BAR}" rx="3" '
            f'fill="{self.colours[bar.job]}"><title>{escape(bar.job)}, attempt {bar.attempt}: '
            f"{bar.start:.1f} to {bar.end:.1f} s on {escape(bar.row)}</title></rect>"
        )
        label = f"{bar.job} #{bar.attempt}"
        if width > 7 * len(label) + 8:
            self._text(x + 6, y + 12, label, 'fill="#fff" font-size="11"')

    def _mark(self, mark: Mark) -> None:
        x, y, colour = self._x(mark.at), self.middle[mark.row], MARK_COLOURS[mark.kind]
        shape = self._shape(mark.kind, x, y, colour)
        self.parts.append(f"<g>{shape}<title>{mark.at:.1f} s: {escape(mark.text)}</title></g>")

    @staticmethod
    def _shape(kind: Kind, x: float, y: float, colour: str) -> str:
        match kind:
            case "checkpoint":
                return (
                    f'<path d="M{x} {y - 6} l5 6 l-5 6 l-5 -6 z" fill="#fff" '
                    f'stroke="{colour}" stroke-width="1.5"/>'
                )
            case "suspend":
                return (
                    f'<path d="M{x} {y - 11} v22" stroke="{colour}" stroke-width="2.5" '
                    'stroke-dasharray="4 2"/>'
                )
            case "kill":
                return (
                    f'<path d="M{x - 6} {y - 6} l12 12 m0 -12 l-12 12" stroke="#fff" '
                    f'stroke-width="5"/><path d="M{x - 6} {y - 6} l12 12 m0 -12 l-12 12" '
                    f'stroke="{colour}" stroke-width="2.5"/>'
                )
            case "resync":
                return (
                    f'<circle cx="{x}" cy="{y}" r="6" fill="#fff" stroke="{colour}" '
                    'stroke-width="2.5"/>'
                )

    def _legend(self, y: float) -> None:
        x = float(LEFT)
        for job, colour in self.colours.items():
            self.parts.append(
                f'<rect x="{x}" y="{y - 10}" width="14" height="12" rx="3" fill="{colour}"/>'
            )
            self._text(x + 20, y, job, 'fill="#333"')
            x += 34 + 7 * len(job)
        kinds: Iterable[Kind] = dict.fromkeys(mark.kind for mark in self.timeline.marks)
        for kind in kinds:
            self.parts.append(self._shape(kind, x + 7, y - 4, MARK_COLOURS[kind]))
            self._text(x + 20, y, MARK_WORDS[kind], 'fill="#333"')
            x += 34 + 6.6 * len(MARK_WORDS[kind])

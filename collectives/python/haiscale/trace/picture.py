"""The picture of a trace, as SVG; pure functions.

For each rank there is a lane of computation, with exposed time in red, and below it the collectives
under way and the bytes to other nodes.
"""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING, Final

from hfreduce.sizes import size_text

from haiscale import svg
from haiscale.trace.spans import Kind, Span, exposed_share, of_kind, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from haiscale.trace.spans import RankTrace

__all__ = ["draw", "thinned"]

COLOURS: Final = {
    Kind.FORWARD: "#3b6fb6",
    Kind.BACKWARD: "#5a9e6f",
    Kind.OPTIMIZER: "#d9822b",
    Kind.WAIT: "#d6293e",
    Kind.COLLECTIVE: "#8d6cab",
    Kind.SENT: "#4a5568",
}
WORDS: Final = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.OPTIMIZER: "optimizer",
    Kind.WAIT: "exposed: waits for communication",
    Kind.COLLECTIVE: "collectives under way",
    Kind.SENT: "bytes to other nodes per second",
}
COMPUTE: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
LEFT, RIGHT, TOP, PLOT_WIDTH = 150, 40, 90, 1200
BAR, ROW, GAP, RANK_GAP = 26, 8, 3, 14
BACKGROUND: Final = "#f4f6f9"
ANCHORED: Final = 'text-anchor="end" fill="#333"'
LABEL: Final = 'text-anchor="middle" font-size="11" fill="#fff"'
TICK: Final = 'text-anchor="middle" fill="#777"'
MORE: Final = ", …"
ROWS_MAX: Final = 6
"""Rows of collectives of a rank; those that need more share the last one."""
PIXELS_MIN: Final = 0.5
LABEL_PIXELS: Final = 7.0
"""Width of a character."""
TICKS: Final = 10


def draw(traces: Sequence[RankTrace]) -> str:
    """The ranks' lanes, in the order of the list. The traces are on one clock, and not empty."""
    plot = _Plot(*_limits(traces))
    peak = max(
        (_rate(span) for trace in traces for span in of_kind(trace.spans, Kind.SENT)), default=0
    )
    lanes: list[str] = []
    y = float(TOP)
    for trace in traces:
        lanes.append(svg.text(LEFT - 10, y + 11, f"rank {trace.rank}, {trace.node}", ANCHORED))
        share = f"exposed {100 * exposed_share(trace.spans):.1f} %"
        lanes.append(svg.text(LEFT - 10, y + 25, share, ANCHORED))
        lanes.append(svg.rect(LEFT, y, PLOT_WIDTH, BAR, BACKGROUND))
        lanes += plot.bars(of_kind(trace.spans, *COMPUTE), y, BAR)
        lanes += plot.bars(of_kind(trace.spans, Kind.WAIT), y, BAR)
        y += BAR + GAP
        placed = rows(of_kind(trace.spans, Kind.COLLECTIVE))
        for index, spans in enumerate(placed):
            lanes += plot.bars(spans, y + min(index, ROWS_MAX - 1) * ROW, ROW - 1)
        y += max(1, min(len(placed), ROWS_MAX)) * ROW
        if peak:
            lanes.append(svg.rect(LEFT, y, PLOT_WIDTH, BAR, BACKGROUND))
            lanes += plot.sent(of_kind(trace.spans, Kind.SENT), y, peak)
            y += BAR
        y += RANK_GAP
    grid = plot.axis(y) + plot.steps(of_kind(traces[0].spans, Kind.STEP), y)
    return svg.document(LEFT + PLOT_WIDTH + RIGHT, y + 24, [*_head(traces, peak), *lanes, *grid])


def thinned(spans: Sequence[Span], scale: float) -> list[Span]:
    """Spans that can be seen: neighbours of one kind that are too short to be seen become one.

    `scale` is in pixels per nanosecond.
    """
    kept: list[Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        last = kept[-1] if kept else span
        is_short = min(last.end - last.start, span.end - span.start) * scale < PIXELS_MIN
        is_near = (span.start - last.end) * scale < PIXELS_MIN
        if kept and last.kind is span.kind and is_short and is_near:
            name = last.name if last.name.endswith(MORE) else last.name + MORE
            end, size = max(last.end, span.end), last.bytes + span.bytes
            kept[-1] = Span(span.kind, name, last.start, end, size)
        else:
            kept.append(span)
    return kept


class _Plot:
    """Positions of times."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end
        self._scale = PLOT_WIDTH / (end - start)

    def x(self, time: int) -> float:
        """The position of a time; times outside the plot are at its edges."""
        return LEFT + (min(max(time, self._start), self._end) - self._start) * self._scale

    def visible(self, spans: Sequence[Span]) -> Iterator[tuple[Span, float, float]]:
        """Spans inside the plot, each with its left edge and its width."""
        inside = [span for span in spans if span.end >= self._start and span.start <= self._end]
        for span in thinned(inside, self._scale):
            x = self.x(span.start)
            yield span, x, self.x(span.end) - x

    def bars(self, spans: Sequence[Span], y: float, height: float) -> Iterator[str]:
        """Each span as a bar, with its name where there is room."""
        for span, x, width in self.visible(spans):
            title = f"{WORDS[span.kind]}: {span.name}, {_duration(span.end - span.start)}"
            shown = max(PIXELS_MIN, width - 0.5)  # a line between neighbours
            yield svg.rect(x, y, shown, height, COLOURS[span.kind], title)
            if height == BAR and width > LABEL_PIXELS * len(span.name):
                yield svg.text(x + width / 2, y + 16, span.name, LABEL)

    def sent(self, spans: Sequence[Span], y: float, peak: float) -> Iterator[str]:
        """Bytes as areas whose height is the rate."""
        for span, x, width in self.visible(spans):
            height = BAR * min(1.0, _rate(span) / peak)
            title = f"{size_text(span.bytes)} in {_duration(span.end - span.start)}"
            top = y + BAR - height
            yield svg.rect(x, top, max(PIXELS_MIN, width), height, COLOURS[span.kind], title)

    def axis(self, bottom: float) -> list[str]:
        """Times from the left edge."""
        length = self._end - self._start
        step = _nice(length / TICKS)
        parts = []
        for number in range(int(length / step) + 1):
            x = LEFT + number * step * self._scale
            parts.append(svg.text(x, bottom + 10, _duration(number * step), TICK))
        return parts

    def steps(self, spans: Sequence[Span], bottom: float) -> list[str]:
        """The start of each step, as a line over all lanes with its name."""
        parts = []
        for span in spans:
            x = self.x(span.start)
            parts.append(svg.rect(x, TOP - 12, 1, bottom - TOP + 8, "#1a202c"))
            parts.append(svg.text(x + 4, TOP - 4, span.name, 'fill="#1a202c" font-weight="600"'))
        return parts


def _head(traces: Sequence[RankTrace], peak: float) -> Iterator[str]:
    """Title, figures, what is missing, and the legend."""
    steps = len(of_kind(traces[0].spans, Kind.STEP))
    mean = sum(exposed_share(trace.spans) for trace in traces) / len(traces)
    world = traces[0].world_size
    of_all = f"{len(traces)} of {world}" if len(traces) < world else str(world)
    title = f"{steps} steps of {of_all} ranks: {100 * mean:.1f} % of the time is exposed"
    yield svg.text(20, 28, title, 'font-size="18" fill="#111"')
    dropped, lost = sum(t.dropped for t in traces), sum(t.lost for t in traces)
    if dropped or lost:
        words = f"incomplete: {dropped} spans above the limit and {lost} operations are missing"
        yield svg.text(LEFT + 760, 28, words, f'fill="{COLOURS[Kind.WAIT]}" font-weight="600"')
    x = 20.0
    legend: list[tuple[Kind, str]] = [(it, WORDS[it]) for it in WORDS if it is not Kind.SENT]
    if peak:
        legend.append((Kind.SENT, f"{WORDS[Kind.SENT]}, full height: {size_text(peak)}"))
    for kind, meaning in legend:
        yield svg.rect(x, 42, 12, 12, COLOURS[kind])
        yield svg.text(x + 17, 52, meaning)
        x += 40 + LABEL_PIXELS * len(meaning)


def _limits(traces: Sequence[RankTrace]) -> tuple[int, int]:
    steps = [span for trace in traces for span in of_kind(trace.spans, Kind.STEP)]
    spans = steps or [span for trace in traces for span in trace.spans]
    start = min((span.start for span in spans), default=0)
    return start, max(max((span.end for span in spans), default=0), start + 1)


def _rate(span: Span) -> float:
    """Bytes per second."""
    return span.bytes * 1e9 / max(1, span.end - span.start)


def _nice(length: float) -> float:
    """The next larger of 1, 2 or 5 times a power of ten, at least 1."""
    power = 10.0 ** floor(log10(max(1.0, length)))
    return next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= length or factor == 10
    )


def _duration(nanoseconds: float) -> str:
    """`12.5 ms`."""
    if not nanoseconds:
        return "0"
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.4g} {unit}"
    return f"{nanoseconds / 1e3:.4g} µs"

"""The bytes between ranks, or between nodes, as a heat map in SVG; pure functions.

Rows are sources, columns destinations. Lines separate nodes, and a frame surrounds the cells inside
a node. The colours of light and dark themes go from that of the background to one far from it.
"""

from __future__ import annotations

from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING, Final

from hfreduce.sizes import size_text

from haiscale import svg
from haiscale.trace.traffic import Unit, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from haiscale.trace.traffic import Traffic

__all__ = ["PLACES_MAX", "draw"]

PLACES_MAX: Final = 128
"""Ranks or nodes of a picture."""
NUMBERS_MAX: Final = 16
"""Ranks or nodes up to which cells have numbers."""
LEFT, TOP, RIGHT, WIDTH_MIN = 110, 130, 30, 680
CELL: Final = 46
"""Pixels of a cell with a number."""
SIDE: Final = 640
"""Pixels of a larger matrix."""
NAME_PIXELS: Final = 10.0
"""Height of a row from which each has its name."""
NAME_CHARACTERS: Final = 12
STEPS: Final = 8
INKS: Final = ("#0b1420",) * 3 + ("#020304",) * 2 + ("#fdfdfe",) * 3
"""Of the number on each step. Dark themes invert the first and the last, and keep the middle."""
PALE, DEEP, PALE_IN_DARK, DEEP_IN_DARK = "#d3e4f5", "#08306b", "#17314d", "#d7ebff"
BACKGROUND, EMPTY, LINE, FRAME = "#ffffff", "#f6f7f9", "#8a94a3", "#c2550a"
TITLE, WORDS = "#111111", "#333333"


def draw(traffic: Traffic, what: str) -> str:
    """The map; `what` are its rows, such as "4 ranks". There are at most `PLACES_MAX` of them."""
    count = len(traffic.names)
    cell = CELL if count <= NUMBERS_MAX else max(4, SIDE // count)
    side = count * cell
    parts = [
        *_head(traffic, what),
        svg.rect(LEFT, TOP, side, side, EMPTY),
        *_cells(traffic, cell),
        *_names(traffic, cell),
        *_nodes(traffic, cell),
    ]
    width = max(WIDTH_MIN, LEFT + side + RIGHT)
    return svg.document(width, TOP + side + 20, parts, _dark())


def colours(pale: str, deep: str) -> list[str]:
    """One colour for each step of the scale."""
    ends = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (pale, deep)]
    mixed = []
    for step in range(STEPS):
        share = step / (STEPS - 1)
        channels = (round(a + (b - a) * share) for a, b in zip(*ends, strict=True))
        mixed.append("#" + "".join(f"{channel:02x}" for channel in channels))
    return mixed


SCALE: Final = colours(PALE, DEEP)


def _dark() -> dict[str, str]:
    fixed = {
        BACKGROUND: "#14171c", EMPTY: "#1c2027", LINE: "#6b7585", FRAME: "#ff9d4d",
        TITLE: "#f2f4f7", WORDS: "#cdd3db", INKS[0]: "#eef4fb", INKS[3]: INKS[3],
        INKS[-1]: "#0a1018",
    }  # fmt: skip
    return fixed | dict(zip(SCALE, colours(PALE_IN_DARK, DEEP_IN_DARK), strict=True))


def _head(traffic: Traffic, what: str) -> Iterator[str]:
    """Title, totals, and the legend."""
    yield svg.text(20, 28, f"bytes between {what}", _ink(TITLE, 'font-size="18"'))
    yield svg.text(20, 48, summary(traffic), _ink(WORDS))
    largest = max(traffic.cells.values(), default=0)
    x = 20.0
    for colour in SCALE:
        yield svg.rect(x, 62, 22, 12, colour)
        x += 22
    for place, size in ((0.0, 0), (0.5, largest / 2), (1.0, largest)):
        middle = _ink(WORDS, 'text-anchor="middle"') if place else _ink(WORDS)
        yield svg.text(20 + place * 22 * STEPS, 88, size_text(size), middle)
    x += 50
    yield from _frame(x, 62, 12, 12, FRAME)
    yield svg.text(x + 18, 72, "inside a node: its memory and local sockets", _ink(WORDS))
    x += 310
    yield svg.rect(x, 62, 12, 12, EMPTY)
    yield svg.text(x + 18, 72, "no bytes", _ink(WORDS))
    words = "row: source, column: destination"
    if len(traffic.names) <= NUMBERS_MAX:
        words += f", numbers in {Unit(traffic.cells.values()).name}"
    yield svg.text(70 + 22 * STEPS, 88, words, _ink(WORDS))


def _cells(traffic: Traffic, cell: int) -> Iterator[str]:
    unit = Unit(traffic.cells.values())
    largest = max(traffic.cells.values(), default=1)
    gap = 1 if cell == CELL else 0
    for (source, destination), size in sorted(traffic.cells.items()):
        step = ceil(STEPS * size / largest) - 1
        x, y = LEFT + destination * cell, TOP + source * cell
        where = "inside the node" if traffic.is_inside(source, destination) else "between nodes"
        names = f"{_name(traffic, source)} to {_name(traffic, destination)}"
        title = f"{names}: {size_text(size)} {where}"
        yield svg.rect(x, y, cell - gap, cell - gap, SCALE[step], title)
        if len(traffic.names) <= NUMBERS_MAX:
            middle = _ink(INKS[step], 'text-anchor="middle" font-size="11" pointer-events="none"')
            yield svg.text(x + cell / 2, y + cell / 2 + 4, unit.text(size), middle)


def _name(traffic: Traffic, place: int) -> str:
    name, node = traffic.names[place], traffic.nodes[place]
    return f"node {node}" if name == node else f"rank {name} on {node}"


def _names(traffic: Traffic, cell: int) -> Iterator[str]:
    """Numbers of ranks at both edges; those of nodes are names."""
    if cell < NAME_PIXELS or traffic.names == traffic.nodes:
        return
    for place, name in enumerate(traffic.names):
        middle = (place + 0.5) * cell
        yield svg.text(LEFT - 6, TOP + middle + 4, name, _ink(WORDS, 'text-anchor="end"'))
        yield svg.text(LEFT + middle, TOP - 6, name, _ink(WORDS, 'text-anchor="middle"'))


def _nodes(traffic: Traffic, cell: int) -> Iterator[str]:
    """Lines between nodes, a frame around the cells of each, and their names."""
    side = len(traffic.names) * cell
    start = 0.0
    for node, members in groupby(traffic.nodes):
        length = len(list(members)) * cell
        if start:
            yield svg.rect(LEFT, TOP + start - 1, side, 1, LINE)
            yield svg.rect(LEFT + start - 1, TOP, 1, side, LINE)
        yield from _frame(LEFT + start - 1, TOP + start - 1, length + 1, length + 1, FRAME)
        if length >= NAME_PIXELS:
            middle = start + length / 2
            name = node if len(node) <= NAME_CHARACTERS else node[: NAME_CHARACTERS - 1] + "…"
            left = LEFT - 28 if traffic.names != traffic.nodes else LEFT - 6
            yield svg.text(left, TOP + middle + 4, name, _ink(WORDS, 'text-anchor="end"'))
            shown = name[: max(1, int(length / 7))]
            middle_anchor = _ink(WORDS, 'text-anchor="middle"')
            yield svg.text(LEFT + middle, TOP - 22, shown, middle_anchor)
        start += length


def _frame(x: float, y: float, width: float, height: float, colour: str) -> Iterator[str]:
    """The border of a rectangle, two pixels wide."""
    yield svg.rect(x, y, width, 2, colour)
    yield svg.rect(x, y + height - 1, width + 1, 2, colour)
    yield svg.rect(x, y, 2, height, colour)
    yield svg.rect(x + width - 1, y, 2, height, colour)


def _ink(colour: str, more: str = "") -> str:
    return f'fill="{colour}" {more}'.rstrip()

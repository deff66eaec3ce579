"""The screen of `threefs top`: fits the terminal, with names that tenants have chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threefs.cli.output import describe_bytes, printable
from threefs.cli.top_rates import KINDS, CallerRates

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, Group
    from rich.text import Text

    from threefs.cli.top_rates import Caller, Service, Sort, Top

__all__ = ["screen"]

NAME_COLUMNS_MIN = 12
"""Columns of a terminal for a volume, and for a client; less important figures make room."""
PATH_SHARE = 0.6
"""Part of the columns for names that volumes get."""
GAP = 2
TITLE_LINES = 2
ROWS_MIN = 3

FIGURES: tuple[tuple[str, int, Callable[[CallerRates], str]], ...] = (
    ("MGMTD/s", 8, lambda rates: _count(rates.kinds["mgmtd"].operations)),
    ("META/s", 8, lambda rates: _count(rates.kinds["meta"].operations)),
    ("STORAGE/s", 9, lambda rates: _count(rates.kinds["storage"].operations)),
    ("READ/s", 10, lambda rates: describe_bytes(rates.data.read_bytes)),
    ("WRITE/s", 10, lambda rates: describe_bytes(rates.data.written_bytes)),
)
"""Title, columns and text; on a narrow terminal the first ones are omitted."""


def screen(top: Top, sort: Sort, console: Console, *, rows_max: int | None = None) -> Group:
    """The load, with as many callers as rows; the others are one row. `rows_max`: default all."""
    from rich.console import Group

    troubles = _troubles(top.services)
    callers = sort.sorted(top.callers)
    if rows_max is not None:
        kept = max(rows_max - TITLE_LINES - 1 - len(troubles), ROWS_MIN)
        hidden, callers = callers[kept:], callers[:kept]
    else:
        hidden = []
    other = CallerRates()
    for rates in (top.other, *(rates for _, rates in hidden)):
        other.add(rates)
    lines = [_title(top), *_rows(callers, other, console), *troubles]
    return Group(*lines)


def _title(top: Top) -> Text:
    total = top.total
    known = [sum(it.kind == kind and it.trouble is None for it in top.services) for kind in KINDS]
    services = ", ".join(f"{count} {kind}" for count, kind in zip(known, KINDS, strict=True))
    text = (
        f"{services}: {_count(total.operations)} operations/s, "
        f"{describe_bytes(total.data.read_bytes)}/s read, "
        f"{describe_bytes(total.data.written_bytes)}/s written"
    )
    return _line(text, "bold")


def _rows(
    callers: list[tuple[Caller, CallerRates]], other: CallerRates, console: Console
) -> list[Text]:
    names = [(_volume(caller, rates), printable(caller.host)) for caller, rates in callers]
    columns, figures = _layout(names, console)
    lines = [
        _row(("VOLUME", "CLIENT"), columns, [title.rjust(width) for title, width, _ in figures])
    ]
    for name, (_, rates) in zip(names, callers, strict=True):
        lines.append(_row(name, columns, [text(rates).rjust(width) for _, width, text in figures]))
    if other.operations or any(other.kinds[kind].written_bytes for kind in KINDS):
        cells = [text(other).rjust(width) for _, width, text in figures]
        lines.append(_row(("all others", ""), columns, cells))
    return lines


Figures = tuple[tuple[str, int, "Callable[[CallerRates], str]"], ...]


def _layout(names: list[tuple[str, str]], console: Console) -> tuple[tuple[int, int], Figures]:
    """Columns of the two names, and the figures for which there is space."""
    from rich.cells import cell_len

    figures = FIGURES
    space = _space(console.width, figures)
    while space < 2 * NAME_COLUMNS_MIN and len(figures) > 1:
        figures = figures[1:]
        space = _space(console.width, figures)
    volume, client = (max([cell_len(name[index]) for name in names], default=0) for index in (0, 1))
    volume, client = max(volume, len("all others")), max(client, len("CLIENT"))
    if volume + client > space:
        volume = min(volume, max(int(space * PATH_SHARE), space - client, 1))
        client = min(client, max(space - volume, 1))
    return (volume, client), figures


def _space(width: int, figures: Figures) -> int:
    return width - GAP - sum(GAP + columns for _, columns, _ in figures)


def _row(names: tuple[str, str], columns: tuple[int, int], figures: list[str]) -> Text:
    from rich.cells import set_cell_size

    # The end of a path is what differs; a client is known by its start.
    volume = set_cell_size(_shortened(names[0], columns[0], keeps_end=True), columns[0])
    client = set_cell_size(_shortened(names[1], columns[1], keeps_end=False), columns[1])
    return _line((" " * GAP).join((volume, client, *figures)))


def _shortened(name: str, columns: int, *, keeps_end: bool) -> str:
    from rich.cells import cell_len

    if cell_len(name) <= columns:
        return name
    while name and cell_len(name) > columns - 1:
        name = name[1:] if keeps_end else name[:-1]
    return f"…{name}" if keeps_end else f"{name}…"


def _volume(caller: Caller, rates: CallerRates) -> str:
    if caller.volume is None:
        return "(cluster key)"
    return printable(rates.path) or f"inode {caller.volume}"


def _troubles(services: list[Service]) -> list[Text]:
    lines = []
    for service in services:
        name = f"{service.kind} {service.name}"
        if service.trouble is not None:
            lines.append(_line(f"{name}: no report: {printable(service.trouble)}", "red"))
        elif service.seconds is None:
            lines.append(_line(f"{name}: its first report; rates follow", "yellow"))
    return lines


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _count(number: float) -> str:
    """A rate: 0, 0.5, 12, 3400."""
    return f"{number:.1f}" if 0 < number < 9.95 else f"{number:.0f}"

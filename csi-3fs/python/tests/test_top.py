"""`threefs top` as computed and drawn: rates of several services, any width, hostile names."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from threefs.cli.output import printable
from threefs.cli.top_rates import Caller, Sort, Top, top_of
from threefs.cli.top_table import screen


def load(operations: int = 0, read_bytes: int = 0, written_bytes: int = 0) -> dict[str, int]:
    return {"operations": operations, "read_bytes": read_bytes, "written_bytes": written_bytes}


def caller(volume: int | None, host: str, *figures: int, path: str = "/v") -> dict[str, Any]:
    return {"volume": volume, "path": path, "host": host, **load(*figures)}


def report(kind: str, name: str, elapsed_ms: int | None, *callers: Any, **fields: Any) -> Any:
    report = {"kind": kind, "name": name, "address": "127.0.0.1:1", "elapsed_ms": elapsed_ms}
    return report | {"callers": list(callers), "other": load(), "trouble": None} | fields


def drawn(top: Top, columns: int, rows_max: int | None = None, sort: Sort = Sort.LOAD) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, color_system=None)
    console.print(screen(top, sort, console, rows_max=rows_max))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_services_of_a_caller_add_up_over_their_own_intervals() -> None:
    reports = [
        report("meta", "a:1", 500, caller(7, "n1", 100, 10, 10)),
        report("storage", "node-1", 1000, caller(7, "n1", 10, 1000, 50), caller(7, "n2", 1)),
        report("storage", "node-2", 2000, caller(7, "n1", 10, 1000, 50), other=load(4, 8, 6)),
    ]
    top = top_of(reports)
    assert list(top.callers) == [Caller(7, "n1"), Caller(7, "n2")]
    rates = top.callers[Caller(7, "n1")]
    assert rates.kinds["meta"].operations == 200
    assert (rates.data.operations, rates.data.read_bytes, rates.data.written_bytes) == (
        15,
        1500,
        75,
    )
    assert (top.other.data.operations, top.other.data.read_bytes) == (2, 4)
    assert top.total.operations == 200 + 15 + 1 + 2
    assert [service.seconds for service in top.services] == [0.5, 1.0, 2.0]


def test_services_without_rates_are_named_and_count_nothing() -> None:
    reports = [
        report("mgmtd", "m:1", 1000),
        # Restarted between two samples: its counters have another origin.
        report("storage", "node-1", None, caller(1, "n", 1 << 60)),
        report("storage", "node-2", None, trouble="connection refused\x1b[2J"),
    ]
    top = top_of(reports)
    assert top.callers == {}
    text = drawn(top, 120, rows_max=1)
    assert text[-2] == "storage node-1: its first report; rates follow"
    assert text[-1] == r"storage node-2: no report: connection refused\x1b[2J"
    assert text[0].startswith("1 mgmtd, 0 meta, 1 storage: 0 operations/s")


def test_each_order() -> None:
    reports = [
        report("meta", "a:1", 1000, caller(1, "n", 9000), caller(2, "n", 50)),
        report(
            "storage", "node-1", 1000, caller(3, "n", 1, 1 << 30), caller(4, "n", 1, 0, 1 << 20)
        ),
    ]
    callers = top_of(reports).callers
    first = {sort: sort.sorted(callers)[0][0].volume for sort in Sort}
    assert first == {
        Sort.LOAD: 3, Sort.OPERATIONS: 1, Sort.METADATA: 1, Sort.READ: 3, Sort.WRITE: 4,
    }  # fmt: skip


NAMES = st.text(max_size=200)
FIGURES = st.tuples(*[st.integers(0, 1 << 50)] * 3)
CALLERS = st.lists(st.tuples(st.none() | st.integers(0, 9), NAMES, NAMES, FIGURES), max_size=40)


@given(CALLERS, st.integers(10, 250), st.integers(1, 60), st.sampled_from(Sort))
def test_any_callers_fit_any_terminal_and_nothing_is_lost(
    callers: Any, columns: int, rows: int, sort: Sort
) -> None:
    loads = [caller(volume, host, *figures, path=path) for volume, host, path, figures in callers]
    top = top_of([report("storage", "node-1", 1000, *loads), report("meta", "a:1", None)])
    lines = drawn(top, columns, rows_max=rows, sort=sort)
    assert len(lines) <= max(rows, 7)
    for line in lines:
        assert cell_len(line) <= columns
        assert line.isprintable()
    expected = sum(figures[0] for *_, figures in callers)
    assert top.total.operations == pytest.approx(expected)


def test_hidden_callers_are_part_of_the_last_row() -> None:
    callers = [caller(volume, "n", 0, 1 << 20, path=f"/v{volume}") for volume in range(10)]
    top = top_of([report("storage", "node-1", 1000, *callers, other=load(1, 1 << 20))])
    lines = drawn(top, 100, rows_max=7)
    assert [line.split()[0] for line in lines[1:]] == ["VOLUME", "/v0", "/v1", "/v2", "/v3", "all"]
    assert lines[-1].split()[:2] == ["all", "others"]
    assert "7.0 MiB" in lines[-1]
    assert len(drawn(top, 100)) == 13


def test_names_move_no_cursor_and_are_no_markup() -> None:
    evil = "/v/\x1b[31m\u202egnp\u2066\n[red]x[/red]\x9b"
    assert printable(evil) == r"/v/\x1b[31m\u202egnp\u2066\n[red]x[/red]\x9b"
    top = top_of([report("storage", "node-1", 1000, caller(1, evil, 1, path=evil))])
    row = drawn(top, 200)[2]
    assert row.isprintable()
    assert row.count("[red]x[/red]") == 2

"""The store of a service in a command: its options, and the progress of reading it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from threefs.cli.output import stderr_console
from threefs.errors import InvalidArgument
from threefs.shared_store import SHARED_STORES, SharedStore

__all__ = ["Data", "Report", "progress", "store_json"]

Data = Annotated[
    Path | None,
    typer.Option(help="Folder of an embedded store: the one with `data.mdb` in it."),
]
Report = Callable[[int, int], None]
"""Receives what is done and the total."""


def store_json(kind: str, data: Path | None, shared: SharedStore) -> str:
    """The store of a service: a folder, or its part of a shared store."""
    config = shared.config(kind)
    if (data is None) == (config is None):
        given = "both are given" if config is not None else "none is given"
        raise InvalidArgument(f"a store is either --data or {SHARED_STORES}: {given}")
    return json.dumps({"data": str(data)} if config is None else config)


@contextmanager
def progress(name: str) -> Iterator[Report]:
    """A bar on stderr, if it is a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = stderr_console()
    columns: list[Any] = [TextColumn(name), BarColumn(), TaskProgressColumn(), Remaining()]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report

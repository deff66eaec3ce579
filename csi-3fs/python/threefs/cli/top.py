"""`threefs top`: load of the services by their callers."""

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from threefs.cli.options import Cluster, Format
from threefs.cli.output import Output, print_json, stdout_console
from threefs.cli.top_rates import Sort, top_of
from threefs.cli.top_table import screen
from threefs.client import connect
from threefs.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from rich.console import Console

    from threefs.cli.top_rates import Top
    from threefs.client import Client

__all__ = ["top"]

PIPE_COLUMNS = 1000
"""Columns of a line that is not shown on a terminal: names are not shortened."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Show one measurement and exit.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds of a measurement.", min=0.1, max=3600.0)
    ] = 2.0,
    sort: Annotated[Sort, typer.Option(help="Order of the callers.")] = Sort.LOAD,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
) -> None:
    """Show which volumes and clients use the services: calls and bytes per second.

    A caller is a volume on a node (or at an address, if its credential names no node), or a holder
    of the cluster's key at an address, such as a service. Each service lists the 256 callers with
    the most load; the others are one row. Needs the cluster's key. Ends with Ctrl-C, with status 0.
    With -o json each measurement is one line. Exit status with --once: 1 if a service has not
    reported.

    Examples: threefs top ; threefs top --sort read ; threefs top --once -o json
    """
    with connect(cluster) as client:
        if once:
            client.usage()
            _show_once(_measure(client, interval), sort, output)
            return
        with suppress(KeyboardInterrupt):
            client.usage()
            _show_until_interrupted(client, interval, sort, output)


def _measure(client: "Client", seconds: float) -> "Top":
    time.sleep(seconds)
    return top_of(json.loads(client.usage()))


def _console() -> "Console":
    console = stdout_console()
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def _show_once(measured: "Top", sort: Sort, output: Output) -> None:
    if output is Output.JSON:
        print_json(_json(measured, sort))
    else:
        console = _console()
        console.print(screen(measured, sort, console))
    if any(service.seconds is None for service in measured.services):
        raise typer.Exit(EXIT_FAILED)


def _show_until_interrupted(client: "Client", interval: float, sort: Sort, output: Output) -> None:
    if output is Output.JSON:
        while True:
            line = json.dumps(_json(_measure(client, interval), sort))
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    console = _console()
    while not console.is_terminal:
        console.print(screen(_measure(client, interval), sort, console))
        console.print()
    _show_live(client, interval, sort, console)


def _show_live(client: "Client", interval: float, sort: Sort, console: "Console") -> None:
    from rich.live import Live
    from rich.text import Text

    first = Text(f"measuring for {interval:g} s")
    with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            measured = _measure(client, interval)
            live.update(screen(measured, sort, console, rows_max=console.height), refresh=True)


def _json(measured: "Top", sort: Sort) -> dict[str, Any]:
    def kinds(rates: Any) -> dict[str, Any]:
        return {
            kind: {f"{name}_per_second": value for name, value in asdict(of_kind).items()}
            for kind, of_kind in rates.kinds.items()
        }

    return {
        "callers": [
            {"volume": caller.volume, "path": rates.path, "host": caller.host, **kinds(rates)}
            for caller, rates in sort.sorted(measured.callers)
        ],
        "other": kinds(measured.other),
        "services": [asdict(service) for service in measured.services],
    }

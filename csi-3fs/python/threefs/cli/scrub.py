"""`threefs scrub`: shows and starts the verification of all stored chunks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer

from threefs.cli.output import Output, describe_bytes, print_json, stdout_console
from threefs.client import connect
from threefs.errors import Unavailable
from threefs.exit_status import EXIT_FAILED
from threefs.nodes import node_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from threefs.client import Client

__all__ = ["show_scrub"]

POLL_SECONDS = 0.5
LISTED_MAX = 20
"""Chunks that the table lists; JSON has at most 256 of each target."""


def show_scrub(
    cluster: Path | None,
    output: Output,
    timeout_seconds: float,
    *,
    start: bool,
    targets: Sequence[int],
    wait_seconds: float,
) -> None:
    """Print the scrubs; exit 1 if chunks are lost or differ, or a target does not answer."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        scrubs: list[dict[str, Any]] = json.loads(client.scrub(start=start, targets=targets))
        if wait_seconds > 0:
            scrubs = _wait(client, scrubs, targets, wait_seconds)
    if output is Output.JSON:
        print_json(scrubs)
    else:
        _show(scrubs)
    if any(_is_bad(scrub) for scrub in scrubs):
        raise typer.Exit(EXIT_FAILED)


def _wait(
    client: Client, scrubs: list[dict[str, Any]], targets: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """The scrubs once none of the passes that run now is running."""
    deadline = time.monotonic() + seconds
    waiting = {scrub["target"]: _started(scrub) for scrub in scrubs}
    while True:
        running = [scrub for scrub in scrubs if _started(scrub) == waiting.get(scrub["target"])]
        running = [scrub for scrub in running if _started(scrub) is not None]
        if not running:
            return scrubs
        if time.monotonic() >= deadline:
            names = ", ".join(f"target-{scrub['target']}" for scrub in running)
            raise Unavailable(
                f"the scrub of {names} is still running after {seconds:g} s; it continues, and "
                "`threefs scrub` shows its progress",
                who="storage",
            )
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        scrubs = json.loads(client.scrub(targets=targets))


def _started(scrub: dict[str, Any]) -> int | None:
    """Start of the running pass."""
    running = (scrub["scrub"] or {}).get("running")
    return None if running is None else int(running["started_unix_s"])


def _is_bad(scrub: dict[str, Any]) -> bool:
    status = scrub["scrub"]
    return status is None or status["damaged"] > 0 or status["different"] > 0


def _show(scrubs: list[dict[str, Any]]) -> None:
    from rich.table import Table

    columns = ("TARGET", "CHAIN", "NODE", "SCRUB", "LAST", "READ", "REPAIRED", "DAMAGED", "NEXT")
    table = Table(*columns, box=None)
    now = time.time()
    for scrub in scrubs:
        names = (f"target-{scrub['target']}", f"chain-{scrub['chain']}", node_name(scrub["node"]))
        status = scrub["scrub"]
        if status is None:
            table.add_row(*names, "[red]unknown[/red]")
            continue
        last, running = status["last"], status["running"]
        current = running or last
        damaged = status["damaged"] + status["different"]
        due = status["due_unix_s"]
        table.add_row(
            *names,
            _progress(status) if running else "idle",
            "never" if last is None else f"{_duration(now - last['finished_unix_s'])} ago",
            describe_bytes(current["bytes"]) if current else "-",
            str(current["repaired"]) if current else "-",
            f"[red]{damaged}[/red]" if damaged else "0",
            "-" if running or due is None else f"in {_duration(due - now)}",
        )
    console = stdout_console()
    console.print(table)
    for scrub in scrubs:
        _show_chunks(scrub)


def _show_chunks(scrub: dict[str, Any]) -> None:
    console, status = stdout_console(), scrub["scrub"]
    if status is None:
        console.print(f"[red]target-{scrub['target']}: {scrub['trouble']}[/red]")
        return
    for kind, problem in (
        ("damaged", "is damaged and no other replica could provide it"),
        ("different", "is newer than on the previous replica of the chain"),
    ):
        chunks = status[f"{kind}_chunks"][:LISTED_MAX]
        for chunk in chunks:
            console.print(
                f"[red]target-{scrub['target']}: chunk {chunk['index']} of inode {chunk['inode']} "
                f"{problem}[/red]"
            )
        if status[kind] > len(chunks):
            console.print(f"[red]target-{scrub['target']}: {status[kind] - len(chunks)} more[/red]")


def _progress(status: dict[str, Any]) -> str:
    share = status["running"]["bytes"] / max(status["used_bytes"], 1)
    return f"running {min(share, 1.0):.0%}"


def _duration(seconds: float) -> str:
    """Format a duration for display: 5 s, 3.1 h, 6.9 d."""
    seconds = max(seconds, 0.0)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"

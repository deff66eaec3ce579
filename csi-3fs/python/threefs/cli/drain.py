"""`threefs drain`: empty storage nodes so that they can be removed, with progress."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from threefs.cli.drain_wait import DrainWait, moves_off, replicas_on
from threefs.cli.output import Output, describe_bytes, print_json, stderr_console, stdout_console
from threefs.client import connect
from threefs.errors import InvalidArgument
from threefs.exit_status import EXIT_FAILED
from threefs.nodes import node_name, nodes_named

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from threefs.client import Client

__all__ = ["Drain", "drain_nodes", "nodes_of"]


@dataclass(frozen=True, slots=True)
class Drain:
    """What the caller asks for."""

    apply: bool
    cancel: bool
    wait: bool
    stalled_seconds: float
    """Maximum time without progress."""


def drain_nodes(
    cluster: Path | None,
    output: Output,
    timeout_seconds: float,
    names: Sequence[str],
    request: Drain,
) -> None:
    """Show the plan; with `apply`, start it and wait until the nodes are empty."""
    if not names and not request.cancel:
        raise InvalidArgument(
            "no node given: pass its name, host, rack or zone as shown by `threefs status`"
        )
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        first = _status(client)
        nodes = nodes_of(names, first)
        plan: dict[str, Any] = json.loads(
            client.drain(
                sorted(nodes) if names else None, apply=request.apply, cancel=request.cancel
            )
        )
        waits = request.apply and request.wait and not request.cancel
        if waits:
            _wait(client, nodes, request.stalled_seconds)
            plan = json.loads(client.rebalance())
        status = _status(client)
    # It may have been changed meanwhile.
    leaving = set(plan["leaving"])
    summary = {
        "leaving": sorted(leaving),
        "applied": request.apply,
        "replicas": replicas_on(leaving, status),
        "moves": moves_off(leaving, plan) + len(plan["under_way"]),
        "stuck": plan["stuck"],
        "separated_by": [_level(first), _level(status)],
    }
    if output is Output.JSON:
        print_json(summary)
    else:
        _show(summary, waited=waits)
    if waits and replicas_on(nodes, status):
        raise typer.Exit(EXIT_FAILED)


def nodes_of(names: Sequence[str], status: dict[str, Any]) -> set[int]:
    """The nodes that the names denote: a node, a service, or a zone, rack or host."""
    routing: dict[str, Any] = status["routing"]["nodes"]
    located = {int(node): str(info.get("location", "")) for node, info in routing.items()}
    nodes: set[int] = set()
    for name in names:
        named = nodes_named(name, located.keys())
        inside = {node for node, where in located.items() if _is_in(where, name)}
        if named and not name.isdecimal() and (others := inside - named):
            raise InvalidArgument(
                f"`{name}` is a zone, rack or host with {node_name(min(others))}, too: give the "
                f"numbers of the nodes, {', '.join(map(str, sorted(named)))}, or the place with "
                f"its outer parts, such as `{located[min(others)]}`"
            )
        matches = inside if named is None else named
        if not matches:
            places = sorted(
                {part for where in located.values() for part in where.split("/")} - {""}
            )
            raise InvalidArgument(
                f"unknown node `{name}`: the nodes are {', '.join(map(node_name, sorted(located)))}"
                + (f", the zones, racks and hosts {', '.join(places)}" if places else "")
            )
        nodes |= matches
    return nodes


def _is_in(location: str, name: str) -> bool:
    """Whether a location is in the domain: one part of it, or several outer parts with slashes."""
    domain = name.rstrip("/")
    return bool(domain) and (
        domain in location.split("/") or (location + "/").startswith(domain + "/")
    )


def _status(client: Client) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(client.status())
    return status


def _wait(client: Client, nodes: set[int], stalled_seconds: float) -> None:
    """Wait with a progress bar; what the moves wait for is shown above it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    first = _status(client)
    total = replicas_on(nodes, first)
    data = sum(it["used_bytes"] for it in first["cluster"]["nodes"] if it["node"] in nodes)
    title = f"{describe_bytes(data)}, replicas moved"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=stderr_console()) as bar:
        task = bar.add_task(title, total=total)
        DrainWait(
            client,
            nodes,
            stalled_seconds,
            progress=lambda left: bar.update(task, completed=total - left),
            show=lambda text: bar.console.print(text, markup=False, soft_wrap=True),
        ).run()


def _level(status: dict[str, Any]) -> str | None:
    """The level at which the replicas of a chain are separated; None for an older mgmtd."""
    domains = status.get("domains")
    return None if domains is None else domains["level"] or "service"


def _show(summary: dict[str, Any], *, waited: bool) -> None:
    console = stdout_console()
    names = ", ".join(node_name(node) for node in summary["leaving"])
    if not names:
        console.print("no node is drained")
        return
    before, now = summary["separated_by"]
    if before != now:
        console.print(
            f"[yellow]replicas of a chain are now on different {now}s, not {before}s[/yellow]"
        )
    if summary["replicas"] == 0:
        console.print(f"{names}: empty; they can be removed")
        return
    console.print(f"{names}: {summary['replicas']} replicas, {summary['moves']} moves remain")
    if summary["stuck"]:
        console.print(
            f"{summary['stuck']} replicas cannot move: no other node has space for them and is in "
            "another service, host, rack and zone than their copies; add nodes there, or drain its "
            "dead ones"
        )
    elif not summary["applied"]:
        console.print("start with --apply")
    elif not waited:
        console.print("`threefs rebalance` shows the remaining moves")

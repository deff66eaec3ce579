"""`threefs status`: nodes, chains and capacity of a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from threefs.cli.drain_wait import replicas_on
from threefs.cli.members import member_states
from threefs.cli.moves import stalls
from threefs.cli.output import Output, describe_bytes, print_json, stdout_console
from threefs.client import connect
from threefs.exit_status import EXIT_FAILED
from threefs.nodes import node_name

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

__all__ = ["show_status"]

STYLES = {
    "SERVING": "green",
    "SYNCING": "yellow",
    "WAITING": "yellow",
    "LASTSRV": "red",
    "OFFLINE": "red",
}


SERVICE_STYLES = {
    "serving": "green",
    "standby": "green",
    "starting": "yellow",
    "unreachable": "red",
}


def show_status(cluster: Path | None, output: Output, timeout_seconds: float) -> None:
    """Print the status; exit 1 if some data is unavailable."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        status: dict[str, Any] = json.loads(client.status())
        status["etcd_members"] = member_states(client.cluster.etcd, timeout_seconds)
    if output is Output.JSON:
        print_json(status)
    else:
        _show(status, stdout_console())
    if status["cluster"]["chains_down"] > 0 or status["meta"] is None:
        raise typer.Exit(EXIT_FAILED)


def _show(status: dict[str, Any], console: Console) -> None:
    cluster = status["cluster"]
    console.print(
        f"mgmtd {cluster['primary']}  epoch {cluster['epoch']}  "
        f"routing {cluster['routing_version']}  chains {cluster['chains_whole']} of "
        f"{cluster['chains']} whole, {cluster['chains_down']} down"
    )
    meta = status["meta"]
    if meta is None:
        console.print(f"[red]meta: {status['meta_trouble']}[/red]")
    else:
        console.print(
            f"meta  removals pending {meta['removals_pending']}  sessions {meta['sessions']}"
        )
    console.print(_managers(status))
    console.print(_nodes(cluster["nodes"], status["routing"]["nodes"]))
    console.print(_chains(status["routing"]))
    if (domains := status.get("domains")) is not None:
        _domains(domains, console)
    if (moves := status.get("moves")) is not None:
        _moves(moves, status, console)
    if (unconfirmed := status.get("unconfirmed")) is not None:
        _unconfirmed(unconfirmed, console)
    for foreign in cluster["foreign_stores"]:
        console.print(
            f"[red]target-{foreign['target']} ({node_name(foreign['node'])}) has a different disk "
            f"than when it served chain-{foreign['chain']}[/red]: restore that disk, or promote "
            "another target with `threefs promote`"
        )


def _managers(status: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table("SERVICE", "ADDRESS", "STATE", "ROLE", box=None)
    kinds = (
        ("mgmtd", "mgmtds", "primary"),
        ("meta", "metas", "collects garbage"),
        ("etcd", "etcd_members", "leader"),
    )
    for kind, field, role in kinds:
        for service in status[field]:
            state = service["state"]
            color = SERVICE_STYLES[state]
            detail = f"  {escape(service['detail'])}" if service["detail"] else ""
            table.add_row(
                kind,
                service["address"],
                f"[{color}]{state}[/{color}]{detail}",
                role if service["leads"] else "",
            )
    return table


def _domains(domains: dict[str, Any], console: Console) -> None:
    console.print(
        f"replicas of a chain are on different {domains['level'] or 'service'}s; a failed node's "
        f"load on the busiest other one: {domains['failover_share']:.2f} times an even share"
    )
    for reason in domains["reasons"]:
        console.print(reason)
    for violation in domains["violations"]:
        nodes = ", ".join(node_name(node) for node in violation["nodes"])
        console.print(
            f"[yellow]chain-{violation['chain']} shares a failure domain[/yellow]: {nodes}"
        )
    if total := domains["violations_total"]:
        console.print(
            f"{total} chains have more replicas in a zone, rack or host than necessary: "
            "`threefs rebalance` shows the moves that change it"
        )


def _moves(moves: dict[str, Any], status: dict[str, Any], console: Console) -> None:
    for node in moves["leaving"]:
        console.print(
            f"{node_name(node)} is drained: {replicas_on({node}, status)} replicas remain"
        )
    for move in moves["under_way"]:
        if move["stalled"] is None:
            console.print(
                f"chain-{move['chain']}: a replica moves from {node_name(move['from'])} to "
                f"{node_name(move['to'])}, {describe_bytes(move['copied_bytes'])} copied"
            )
    for line in stalls(moves):
        console.print(line, style="yellow", markup=False, soft_wrap=True)


def _unconfirmed(report: dict[str, Any], console: Console) -> None:
    for chain in report["chains"]:
        console.print(
            f"chain-{chain['chain']} waits, because the store of mgmtd was restored from a backup: "
            f"{chain['reason']}. Start these storage services; if their data is lost, see "
            "`threefs promote`",
            style="red",
            markup=False,
            soft_wrap=True,
        )
    if unknown := report["unknown_targets"]:
        names = ", ".join(
            f"target-{it['target']} of chain-{it['chain']} ({node_name(it['node'])})"
            for it in unknown
        )
        console.print(
            f"not in the restored chain table, kept and not used: {names}",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


def _nodes(nodes: list[dict[str, Any]], routing: dict[str, Any]) -> Any:
    from rich.table import Table

    columns = ("NODE", "ADDRESS", "LOCATION", "STATE", "HEARTBEAT", "USED", "CAPACITY")
    table = Table(*columns, box=None)
    for node in nodes:
        age = node["heartbeat_age_ms"]
        capacity = node["capacity_bytes"]
        table.add_row(
            node_name(node["node"]),
            node["address"],
            routing.get(str(node["node"]), {}).get("location", ""),
            "[green]alive[/green]" if node["alive"] else "[red]dead[/red]",
            "never" if age is None else f"{age / 1000:.1f} s ago",
            describe_bytes(node["used_bytes"]),
            describe_bytes(capacity) if capacity else "unknown",
        )
    return table


def _chains(routing: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("CHAIN", "VERSION", "TARGETS (head first)", box=None)
    for chain in routing["chains"].values():
        targets = "  ".join(
            f"[{STYLES[place['state']]}]{place['state']}[/] target-{place['target']}"
            f" ({node_name(place['node'])})"
            for place in chain["targets"]
        )
        table.add_row(f"chain-{chain['id']}", str(chain["version"]), targets)
    return table

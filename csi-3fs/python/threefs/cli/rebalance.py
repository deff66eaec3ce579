"""`threefs rebalance`: planned moves, and moves in progress."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from threefs.cli.moves import stalls, waits
from threefs.cli.output import Output, describe_bytes, print_json, stdout_console
from threefs.client import connect
from threefs.errors import InvalidArgument
from threefs.nodes import node_name

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

__all__ = ["show_rebalance"]


def show_rebalance(
    cluster: Path | None,
    output: Output,
    timeout_seconds: float,
    *,
    apply: bool,
    bytes_per_second: int | None,
) -> None:
    """Print the plan; with `apply`, start it."""
    if bytes_per_second is not None and bytes_per_second < 0:
        raise InvalidArgument(f"--rate is {bytes_per_second}; it must be 0 (no limit) or more")
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        rate = client.move_rate(bytes_per_second)
        plan: dict[str, Any] = json.loads(client.rebalance(apply=apply))
        report = client.moves(plan=True)
    moves: dict[str, Any] | None = None if report is None else json.loads(report)
    plan["waiting"] = None if moves is None else moves["waiting"]
    plan["bytes_per_second_max"] = rate
    if output is Output.JSON:
        print_json(plan)
        return
    _show(plan, moves, stdout_console(), apply=apply)


def _show(
    plan: dict[str, Any], moves: dict[str, Any] | None, console: Console, *, apply: bool
) -> None:
    for move in plan["under_way"]:
        console.print(
            f"chain-{move['chain']}: target-{move['source']} moves to "
            f"target-{move['destination']} now"
        )
    for move in plan["moves"]:
        console.print(
            f"chain-{move['chain']}: a replica moves from {node_name(move['from'])} to "
            f"{node_name(move['to'])}"
        )
    if moves is not None:
        _show_waits(moves, console, started=apply or plan["automatic"] or bool(plan["leaving"]))
    if rate := plan["bytes_per_second_max"]:
        console.print(f"moves copy at most {describe_bytes(rate)} per second on average")
    if plan["new_chains"]:
        console.print(f"{plan['new_chains']} chains are added for new files")
    if plan["stuck"]:
        console.print(
            f"{plan['stuck']} replicas cannot move: no other node has space for them (a tenth of "
            "its disk free, and no abandoned move in the last ten minutes) and is in another "
            "service, host, rack and zone than their copies; keep their nodes"
        )
    elif not (plan["under_way"] or plan["moves"] or plan["new_chains"]):
        console.print("no moves are needed")
    if (plan["moves"] or plan["new_chains"]) and not (apply or plan["automatic"]):
        console.print("start with `threefs rebalance --apply`")


def _show_waits(moves: dict[str, Any], console: Console, *, started: bool) -> None:
    for line in stalls(moves):
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    # Those without a place are counted below.
    waiting = (move for move in moves["waiting"] if move["wait"]["cause"] != "no_place")
    for line in waits(waiting) if started else []:
        console.print(line, markup=False, soft_wrap=True)

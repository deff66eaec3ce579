"""Text of the moves of replicas and of what they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threefs.nodes import node_name

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NORMAL_CAUSES", "stalls", "waits"]

NORMAL_CAUSES = {"others", "order"}
"""Waits that end with the moves in progress."""
CHAINS_MAX = 5
"""Chains that a line names."""


def stalls(report: dict[str, Any]) -> list[str]:
    """The moves in progress that make no progress."""
    return [
        f"chain-{move['chain']}: the move from {node_name(move['from'])} to "
        f"{node_name(move['to'])} waits: {move['stalled']['detail']}"
        for move in report["under_way"]
        if move["stalled"] is not None
    ]


def waits(moves: Iterable[dict[str, Any]]) -> list[str]:
    """The planned moves that do not start, one line for each cause."""
    chains: dict[str, list[int]] = {}
    for move in moves:
        chains.setdefault(move["wait"]["detail"], []).append(move["chain"])
    lines = []
    for detail, numbers in chains.items():
        names = ", ".join(f"chain-{number}" for number in numbers[:CHAINS_MAX])
        more = f" and {len(numbers) - CHAINS_MAX} more" if len(numbers) > CHAINS_MAX else ""
        lines.append(f"{names}{more}: waits: {detail}")
    return lines

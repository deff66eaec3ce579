"""`threefs promote`: selects the leading copy of a chain whose last replicas are lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from threefs.cli.output import Output, print_json, stdout_console
from threefs.client import connect
from threefs.nodes import node_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["show_promotion"]


def show_promotion(
    cluster: Path | None, output: Output, timeout_seconds: float, *, target: int, apply: bool
) -> None:
    """Print the consequences of the promotion; with `apply`, execute it."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        promotion: dict[str, Any] = json.loads(client.promote(target, apply=apply))
    if output is Output.JSON:
        print_json(promotion)
        return
    console = stdout_console()
    for line in _sentences(promotion):
        console.print(line)
    if apply:
        console.print(f"target-{target} leads chain-{promotion['chain']} from now on")
    else:
        console.print(f"nothing was changed; to promote it, run `threefs promote {target} --apply`")


def _sentences(promotion: dict[str, Any]) -> list[str]:
    lines = [
        f"target-{promotion['target']} ({node_name(promotion['node'])}) holds "
        f"{promotion['chunks']} chunks of chain-{promotion['chain']}"
    ]
    if not promotion["was_complete"]:
        lines.append("its store has never served: any chunk may be missing")
    last = ", ".join(
        f"target-{target} ({node_name(node)})" for target, node in promotion["served_last"]
    )
    if last:
        lines.append(
            f"{last} served after it: writes that the chain acknowledged since then are lost, even "
            "if one of them returns. If possible, restore one of them with its disk instead"
        )
    return lines

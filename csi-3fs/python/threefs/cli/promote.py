"""`threefs promote`: which copy leads a chain whose last replicas are lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from threefs.cli.output import Output, print_json, stdout_console
from threefs.client import connect

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["show_promotion"]


def show_promotion(
    cluster: Path | None, output: Output, timeout_seconds: float, *, target: int, apply: bool
) -> None:
    """Print what the promotion means; with `apply` it is done."""
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
        console.print(f"nothing is changed so far; `threefs promote {target} --apply` does it")


def _sentences(promotion: dict[str, Any]) -> list[str]:
    lines = [
        f"target-{promotion['target']} (node-{promotion['node']}) holds {promotion['chunks']} "
        f"chunks of chain-{promotion['chain']}"
    ]
    if not promotion["was_complete"]:
        lines.append("its store has never served: any chunk may be missing")
    last = ", ".join(f"target-{target} (node-{node})" for target, node in promotion["served_last"])
    if last:
        lines.append(
            f"{last} served after it: what the chain acknowledged since then is lost, also if one "
            "of them comes back. Bring one of them back with its disk instead, if that is possible"
        )
    return lines

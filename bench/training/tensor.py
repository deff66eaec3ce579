"""Measurement of tensor parallelism on one node, over HFReduce and Gloo, next to one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hfreduce.testing import Layout

from bench.report import say
from bench.rows import Row, row
from bench.training.figures import ALONE
from bench.training.rank import Spec
from bench.training.session import Session
from bench.training.tensor_rank import rank_main
from bench.training.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["tensor", "tensor_rows"]

WIDTHS: Final = (128, 256, 512, 1024)
OURS, SEQUENCE, GLOO = "hfreduce", "hfreduce:sequence", "gloo"
VARIANTS: Final = (OURS, SEQUENCE, GLOO, f"{GLOO}:sequence", ALONE)
GLOO_GOAL, ALONE_GOAL = 0.5, 1.0
ALONE_WIDTH: Final = 1024
"""The smallest of these widths at which two ranks should not be slower than one."""


def tensor(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Steps of a small Llama with tp 2; variants take turns in the same ranks."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    with Session(rank_main) as session:
        group = session.start(Spec("tensor", None, (OURS, GLOO)), Layout.one_node(2))
        for width in WIDTHS[: 1 if quick else None]:
            turns = Turns(group, batch=width)
            turns.run(VARIANTS, rounds)
            say(f"width {width}: measured")
            details[f"width {width}"] = {"seconds": turns.seconds}
            rows += tensor_rows(f"TP 2, width {width}", width, turns.seconds)
    return rows, details


def tensor_rows(title: str, width: int, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """Rows of one width. Pure."""
    rows = [row(f"{title}: {name}", "ms", [s * 1e3 for s in seconds[name]]) for name in seconds]

    def ratio(own: str, peer: str) -> list[float]:
        return [a / b for a, b in zip(seconds[own], seconds[peer], strict=True)]

    goal = GLOO_GOAL if width <= 512 else None
    rows.append(row(f"{title}: HFReduce / Gloo", "of", ratio(OURS, GLOO), goal))
    rows.append(
        row(f"{title}: the same, sequence", "of", ratio(SEQUENCE, f"{GLOO}:sequence"), goal)
    )
    own_goal = ALONE_GOAL if width >= ALONE_WIDTH else None
    rows.append(row(f"{title}: HFReduce / one rank", "of", ratio(OURS, ALONE), own_goal))
    return rows

"""HFReduce and Gloo through torch in several layouts: gradients of the example, and single tensors.

Four real nodes use TCP; shared memory between nodes exists only where one machine simulates them,
and Gloo uses TCP in all layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hfreduce.testing import Layout

from bench.collectives.harness import BenchError, Case
from bench.collectives.speed import LARGE, MIB, SHORT, SIZES, SMALL, compared, measure
from bench.collectives.torch_rank import GRADIENT_BUCKETS
from bench.rows import Row, row

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PARTS"]

GRADIENTS: Final = Case("float32", 0, call=GRADIENT_BUCKETS)
# Ranks, and HFREDUCE_TRANSPORT.
LAYOUTS: Final = {
    "4 nodes x 2, TCP": (Layout.two_zones(2, 2), "tcp"),
    "4 nodes x 2, shared memory": (Layout.two_zones(2, 2), "auto"),
    "1 node x 8": (Layout.one_node(8), "auto"),
}
GOAL: Final = ("4 nodes x 2, TCP", GRADIENTS, 3.0)


def layouts(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """All cases in each layout; a quick run has only the gradients and 4 KiB."""
    sizes = (SMALL,) if quick else (SMALL, MIB, 16 * MIB, LARGE)
    cases = [GRADIENTS, *(Case(kind, n) for n in sizes for kind in ("float32", "bfloat16"))]
    rows: list[Row] = []
    details = {}
    for name, (layout, transport) in LAYOUTS.items():
        measured = measure(layout, transport, cases, (), rounds)
        details[name] = measured.document()
        for case in cases:
            torch = measured.of("torch", case)
            if torch is None:
                raise BenchError(f"{name}, {case.order}: not measured")
            what = f"{name}, {_title(case)}"
            goal = GOAL[2] if (name, case) == GOAL[:2] else None
            rows.append(row(what, "ms", [value * 1e3 for value in torch]))
            rows.append(compared(f"{what}: x Gloo", torch, measured.of("gloo", case), goal))
    return rows, details


def _title(case: Case) -> str:
    size = "gradients" if case == GRADIENTS else SIZES.get(case.size_bytes)
    return f"{size or f'{case.size_bytes // MIB} MiB'} {SHORT[case.type]}"


PARTS: dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]] = {"layouts": layouts}

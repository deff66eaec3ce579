"""Costs of haiscale for a script that gains nothing from it: the import, hooks on one rank."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import Any, Final

from hfreduce.testing import Layout

from bench.rows import Row, row
from bench.training.figures import ALONE, HAISCALE
from bench.training.models import Model
from bench.training.rank import Spec
from bench.training.session import Session
from bench.training.turns import Turns

__all__ = ["cost"]

GPT: Final = Model("gpt", width=128, layers=5, context=128)
"""The example's model."""
BATCH: Final = 2
IMPORT_GOAL_MS, HOOKS_GOAL = 50.0, 1.02
IMPORT: Final = """
import time, torch, torch.distributed
start = time.perf_counter()
import haiscale.ddp
print(1e3 * (time.perf_counter() - start))
"""


def cost(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """The import next to torch's, and steps of the example's GPT on a single rank."""
    imports = [_import_ms() for _ in range(1 if quick else rounds)]
    with Session() as session:
        spec = Spec("one", GPT, ("hfreduce",))
        turns = Turns(session.start(spec, Layout.one_node(1)), batch=BATCH)
        turns.run([ALONE, HAISCALE], rounds)
    pairs = zip(turns.seconds[HAISCALE], turns.seconds[ALONE], strict=True)
    hooks = [own / alone for own, alone in pairs]
    rows = [
        row("import haiscale.ddp, after torch", "ms", imports, IMPORT_GOAL_MS),
        row("GPT, 1 rank: haiscale / alone", "of", hooks, HOOKS_GOAL),
    ]
    details = {"model": asdict(GPT), "batch": BATCH, "seconds": turns.seconds}
    return rows, {"GPT, 1 rank": details, "import_ms": imports}


def _import_ms() -> float:
    command = [sys.executable, "-c", IMPORT]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return float(result.stdout)

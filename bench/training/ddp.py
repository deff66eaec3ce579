"""Measurements of data parallelism: steps of each wrapper, next to their parts alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from hfreduce.testing import Layout

from bench import netns
from bench.report import say
from bench.rows import Row, absent
from bench.training.figures import (
    ALONE,
    HAISCALE,
    TORCH_GLOO,
    TORCH_HFREDUCE,
    WIRE,
    backend_rows,
    ddp_rows,
)
from bench.training.models import Model, missing
from bench.training.rank import Spec
from bench.training.session import Session
from bench.training.turns import Turns

__all__ = ["backends", "gpt", "wire"]

BATCH_MAX: Final = 256
WIRES: Final = (f"{WIRE}gloo", f"{WIRE}hfreduce")
MIB: Final = 1 << 20

GPT: Final = Model("gpt", width=256, layers=5, context=16)
NANO: Final = Model("gpt", width=128, layers=5, context=64)
NANO_BATCH: Final = 4
GPT_LAYOUTS: Final = {
    "GPT, 1 node x 8": (Layout.one_node(8), "auto"),
    "GPT, 4 nodes x 2": (Layout.two_zones(2, 2), "tcp"),
}
TIMED: Final = Model(
    "timed", width=64, layers=24, context=4, parameters=3 * MIB // 16, bucket_mebibytes=0.75
)
"""24 layers with a bucket of 0.75 MiB each, as of a model with 600 MiB in torch's of 25 MiB."""
WIRE_ZONES: Final = (4, 4)
WIRE_MEGABITS: Final = 500
"""Slow enough that two processors serve eight nodes and the links are the limit."""
COMPUTE: Final = {"8 nodes, wire 100 %": 1.0, "8 nodes, wire 50 %": 2.0}
"""Time of forward and backward pass, as a multiple of HFReduce's allreduces alone."""


def gpt(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Real computation; the batch makes it last about as long as Gloo's allreduces."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    absences = _absences()
    for title, (layout, transport) in GPT_LAYOUTS.items():
        with Session() as session:
            spec = Spec("gpt", GPT, ("hfreduce", "gloo"))
            turns = Turns(session.start(spec, layout, transport=transport))
            wire = turns.typical(WIRES[0])
            turns.batch, compute = _batch(turns, wire, quick=quick)
            say(f"{title}: batch {turns.batch}, compute {compute:.3f} s, Gloo {wire:.3f} s")
            turns.run(_variants(absences), rounds)
        details[title] = {
            "batch": turns.batch, "model": asdict(GPT), "seconds": turns.seconds
        }  # fmt: skip
        rows += ddp_rows(title, turns.seconds, absences, on_wire=False)
    return rows, details


def wire(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Timed layers on eight nodes with one link each."""
    subject = f"8 nodes at {WIRE_MEGABITS} Mb/s"
    if why := netns.missing():
        return [absent(name, why) for name in COMPUTE], {}
    rows: list[Row] = []
    details: dict[str, Any] = {}
    absences = _absences()
    with Session() as session:
        spec = Spec("wire", TIMED, ("hfreduce", "gloo"))
        group = session.start_on_wire(spec, WIRE_ZONES, 1, WIRE_MEGABITS)
        communication = Turns(group).typical(WIRES[1])
        for name, factor in [*COMPUTE.items()][: 1 if quick else None]:
            turns = Turns(group, compute_seconds=factor * communication)
            say(f"{subject}, {name}: allreduces {communication:.3f} s")
            turns.run(_variants(absences), rounds)
            details[name] = {
                "model": asdict(TIMED),
                "megabits": WIRE_MEGABITS,
                "compute_seconds": turns.compute_seconds,
                "seconds": turns.seconds,
            }
            rows += ddp_rows(name, turns.seconds, absences, on_wire=True)
    return rows, details


def backends(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """A small GPT under torch's DDP; only the name of the backend differs."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    variants = {"gloo": TORCH_GLOO, "hfreduce": TORCH_HFREDUCE}
    for ranks in (2,) if quick else (2, 4, 8):
        with Session() as session:
            turns = {
                name: Turns(
                    session.start(Spec(name, NANO, (name,)), Layout.one_node(ranks)),
                    batch=NANO_BATCH,
                )
                for name in variants
            }
            for name, variant in variants.items():
                turns[name].once(variant, 2, check=True)
            once = max(turns[name].once(variant) for name, variant in variants.items())
            count = Turns.count(once)
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            for number in range(rounds):
                for name in sorted(variants, reverse=number % 2 == 1):
                    seconds[name].append(turns[name].once(variants[name], count))
        details[f"{ranks} ranks"] = {"model": asdict(NANO), "batch": NANO_BATCH, "seconds": seconds}
        rows += backend_rows(f"small GPT, {ranks} ranks", seconds["gloo"], seconds["hfreduce"])
    return rows, details


def _absences() -> dict[str, str]:
    return {name: why for name in (HAISCALE,) if (why := missing(name)) is not None}


def _variants(absences: dict[str, str]) -> list[str]:
    variants = [ALONE, *WIRES, TORCH_GLOO, TORCH_HFREDUCE, HAISCALE]
    return [name for name in variants if name not in absences]


def _batch(turns: Turns, seconds: float, *, quick: bool) -> tuple[int, float]:
    """The batch whose computation takes closest to this time, and its time; powers of two."""
    turns.batch = 1
    best = 1, turns.typical(ALONE)
    while not quick and best[1] < seconds and turns.batch < BATCH_MAX:
        turns.batch *= 2
        compute = turns.typical(ALONE)
        if compute / seconds > seconds / best[1]:
            break
        best = turns.batch, compute
    return best

"""Measurements of sharding: steps and memory of haiscale.fsdp, torch's FSDP2 and haiscale.ddp."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from hfreduce.testing import Layout

from bench import netns
from bench.report import say
from bench.rows import Row, absent, row
from bench.training import sharded
from bench.training.ddp import TIMED, WIRE_MEGABITS, WIRE_ZONES
from bench.training.figures import ALONE, HAISCALE, TORCH_GLOO
from bench.training.models import Model
from bench.training.rank import Spec
from bench.training.session import Session
from bench.training.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["fsdp", "fsdp_wire", "wire_rows"]

MIB: Final = 1 << 20
LLAMA: Final = Model("llama", width=256, layers=6, context=16)
BATCH: Final = 4
OURS, GLOO, HFREDUCE = (f"{sharded.PREFIX}{name}" for name in ("haiscale", "gloo", "hfreduce"))
TITLES: Final = {
    OURS: "haiscale.fsdp", GLOO: "torch FSDP2, Gloo", HFREDUCE: "torch FSDP2, HFReduce",
    HAISCALE: "haiscale.ddp",
}  # fmt: skip
GOALS: Final = {GLOO: 0.5, HFREDUCE: None, HAISCALE: 1.5}
HIDDEN_GOAL: Final = 85.0
RANKS: Final = 8


def fsdp(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """A Llama on eight ranks of one node: real computation, and bytes of its state."""
    title = f"Llama, 1 node x {RANKS}"
    with Session() as session:
        spec = Spec("fsdp", LLAMA, ("hfreduce", "gloo"))
        turns = Turns(session.start(spec, Layout.one_node(RANKS)), batch=1 if quick else BATCH)
        say(f"{title}: batch {turns.batch}")
        turns.run([ALONE, *TITLES], rounds)
        ours = turns.once(f"{sharded.MEMORY}{OURS}")
        replicated = turns.once(f"{sharded.MEMORY}{TORCH_GLOO}")
    rows = [_milliseconds(f"{title}: compute alone", turns.seconds[ALONE])]
    rows += [
        _milliseconds(f"{title}: {name}", turns.seconds[each]) for each, name in TITLES.items()
    ]
    for peer, goal in GOALS.items():
        ratios = _each(turns.seconds, lambda a, b: a / b, OURS, peer)
        rows.append(row(f"{title}: haiscale.fsdp / {TITLES[peer]}", "of", ratios, goal))
    blocks = sorted(
        sum(p.nbytes for p in part.parameters()) for part in sharded.parts(LLAMA.build())
    )
    limit = replicated / RANKS + sum(blocks[-2:])
    rows += [
        row(f"{title}: state of haiscale.fsdp", "MiB", [ours / MIB]),
        row(f"{title}: state of a replica", "MiB", [replicated / MIB]),
        row(f"{title}: state / (1/{RANKS} of a replica + 2 blocks)", "of", [ours / limit], 1.0),
    ]
    details = {"batch": turns.batch, "model": asdict(LLAMA), "seconds": turns.seconds,
               "state_bytes": {"sharded": ours, "replicated": replicated}}  # fmt: skip
    return rows, {title: details}


def fsdp_wire(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Timed layers on eight nodes with one link each; computation as long as communication."""
    subject = f"sharded, 8 nodes at {WIRE_MEGABITS} Mb/s"
    if why := netns.missing():
        return [absent(subject, why)], {}
    variants = [OURS, HFREDUCE]
    wires = [f"{sharded.WIRE}{name}" for name in ("hfreduce",)]
    rows: list[Row] = []
    details: dict[str, Any] = {}
    with Session() as session:
        spec = Spec("fsdp-wire", TIMED, ("hfreduce",))
        group = session.start_on_wire(spec, WIRE_ZONES, 1, WIRE_MEGABITS)
        communication = Turns(group).typical(wires[0])
        for name, factor in {"100 %": 1.0, "50 %": 2.0}.items():
            turns = Turns(group, compute_seconds=factor * communication)
            say(f"{subject}, wire {name}: gathers and scatters {communication:.3f} s")
            turns.run([ALONE, *wires, *variants], rounds)
            rows += wire_rows(f"{subject}, wire {name}", turns.seconds, wires[0], variants)
            details[name] = {
                "model": asdict(TIMED),
                "megabits": WIRE_MEGABITS,
                "compute_seconds": turns.compute_seconds,
                "seconds": turns.seconds,
            }
            if quick:
                break
    return rows, details


def wire_rows(
    title: str, seconds: Mapping[str, Sequence[float]], wire: str, variants: Sequence[str]
) -> list[Row]:
    """Steps on a wire, and the share of the communication that does not delay them."""
    rows = [
        _milliseconds(f"{title}: compute alone", seconds[ALONE]),
        _milliseconds(f"{title}: gathers and scatters alone", seconds[wire]),
    ]
    for variant in variants:
        hidden = _each(seconds, lambda s, c, w: 100 * (1 - (s - c) / w), variant, ALONE, wire)
        goal = HIDDEN_GOAL if variant == OURS else None
        rows.append(_milliseconds(f"{title}: {TITLES[variant]}", seconds[variant]))
        rows.append(row(f"{title}: {TITLES[variant]}, hidden", "%", hidden, goal, more=True))
    return rows


def _milliseconds(name: str, seconds: Sequence[float]) -> Row:
    return row(name, "ms", [value * 1e3 for value in seconds])


def _each(seconds: Mapping[str, Sequence[float]], formula: Any, *names: str) -> list[float]:
    """A formula of each round, so that a slow round affects all its terms."""
    columns = zip(*(seconds[name] for name in names), strict=True)
    return [formula(*values) for values in columns]

"""Rows of the training benchmark, from the seconds of each round. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bench.rows import Row, absent, row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ALONE", "HAISCALE", "TORCH_GLOO", "TORCH_HFREDUCE", "WIRE", "backend_rows", "ddp_rows"]

ALONE: Final = "alone"
"""The model without communication."""
TORCH_GLOO: Final = "torch+gloo"
TORCH_HFREDUCE: Final = "torch+hfreduce"
HAISCALE: Final = "haiscale"
WIRE: Final = "wire:"
"""Prefix of a backend: the allreduces of a step without computation."""
TITLES: Final = {
    TORCH_GLOO: "torch, Gloo",
    TORCH_HFREDUCE: "torch, HFReduce",
    HAISCALE: "haiscale",
}
WIRES: Final = {
    TORCH_GLOO: f"{WIRE}gloo",
    TORCH_HFREDUCE: f"{WIRE}hfreduce",
    HAISCALE: f"{WIRE}hfreduce",
}
GLOO_GOAL, TORCH_GOAL, BOUND_GOAL = 0.6, 0.9, 1.12


def ddp_rows(
    title: str, seconds: Mapping[str, Sequence[float]], missing: Mapping[str, str], *, on_wire: bool
) -> list[Row]:
    """One layout: its parts alone, the step and the exposed share of each wrapper, and ratios.

    The exposed share is (step - compute) / wire: the share of the communication that delays the
    step. `on_wire` adds the ratio to the larger of both, which no order of work can be faster than.
    """
    rows = [_milliseconds(f"{title}: compute alone", seconds[ALONE])]
    rows += [
        _milliseconds(f"{title}: {name} alone", seconds[wire])
        for name, wire in (("Gloo", WIRES[TORCH_GLOO]), ("HFReduce", WIRES[TORCH_HFREDUCE]))
    ]
    for variant, name in TITLES.items():
        if variant in missing:
            rows.append(absent(f"{title}: {name}", missing[variant]))
            continue
        rows.append(_milliseconds(f"{title}: {name}", seconds[variant]))
        exposed = _each(seconds, lambda s, c, w: 100 * (s - c) / w, variant, ALONE, WIRES[variant])
        rows.append(row(f"{title}: {name}, exposed", "%", exposed))
        if on_wire:
            bound = _each(seconds, lambda s, c, w: s / max(c, w), variant, ALONE, WIRES[variant])
            goal = BOUND_GOAL if variant == HAISCALE else None
            rows.append(row(f"{title}: {name} / larger part", "of", bound, goal))
    pairs: list[tuple[str, str, float | None]] = [(TORCH_HFREDUCE, TORCH_GLOO, None)]
    if not on_wire:
        pairs += [(HAISCALE, TORCH_GLOO, GLOO_GOAL), (HAISCALE, TORCH_HFREDUCE, TORCH_GOAL)]
    for own, peer, goal in pairs:
        name = f"{title}: {TITLES[own]} / {TITLES[peer]}"
        if own in missing:
            rows.append(absent(name, missing[own], goal))
        else:
            rows.append(row(name, "of", _each(seconds, lambda a, b: a / b, own, peer), goal))
    if on_wire and HAISCALE in missing:
        rows.append(absent(f"{title}: haiscale / larger part", missing[HAISCALE], BOUND_GOAL))
    return rows


def backend_rows(title: str, gloo: Sequence[float], hfreduce: Sequence[float]) -> list[Row]:
    """The step of torch's DDP with each backend: only the name in init_process_group differs."""
    ratios = [own / peer for own, peer in zip(hfreduce, gloo, strict=True)]
    return [
        _milliseconds(f"{title}: gloo", gloo),
        _milliseconds(f"{title}: hfreduce", hfreduce),
        replace(row(f"{title}: hfreduce / gloo", "of", ratios), note="smaller is faster"),
    ]


def _milliseconds(name: str, seconds: Sequence[float]) -> Row:
    return row(name, "ms", [value * 1e3 for value in seconds])


def _each(
    seconds: Mapping[str, Sequence[float]], formula: Callable[..., float], *names: str
) -> list[float]:
    """A formula of each round, so that a slow round affects all its terms."""
    columns = zip(*(seconds[name] for name in names), strict=True)
    return [formula(*values) for values in columns]

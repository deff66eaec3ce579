"""HFReduce, Gloo, Open MPI and MPICH in the same rounds, beside what the memory gives in them."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfreduce import _native
from hfreduce.testing import Layout

from bench.collectives.crews import MPI, Crews
from bench.collectives.rows import Row, absent, row, times
from bench.collectives.stage import Case, Lane, Stage, play

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Measured", "many", "pair", "tcp"]

MIB = 1 << 20
LARGE, SMALL = 64 * MIB, 4096
TRIAD_BYTES = 64 * MIB
"""Of each array: three of them are larger than a last-level cache."""
CORES = 2
"""Threads of the triad, as many as the goals are for."""

SIZES = {LARGE: "64 MiB", SMALL: "4 KiB"}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(slots=True)
class Measured:
    """One layout's rounds."""

    ranks: int
    lanes: dict[str, Lane]
    triad: list[float] = field(default_factory=list)
    """Bytes per second, once a round."""

    def of(self, lane: str, case: Case) -> list[float] | None:
        """Seconds of one call, round by round; None if that was not measured."""
        found = self.lanes.get(lane)
        return None if found is None else found.seconds.get(case) or None

    def document(self) -> dict[str, Any]:
        """Everything, in microseconds."""
        return {
            "ranks": self.ranks,
            "triad_gbps": [value / 1e9 for value in self.triad],
            "rounds_us": [
                {
                    "crew": name, "type": case.type, "bytes": case.size_bytes,
                    "memory": case.memory, "calls": lane.counts[case],
                    "us": [value * 1e6 for value in seconds],
                }
                for name, lane in self.lanes.items()
                for case, seconds in lane.seconds.items()
            ],
        }  # fmt: skip


def measure(
    layout: Layout, transport: str, cases: Sequence[Case], peers: Sequence[str], rounds: int
) -> Measured:
    """All crews that this machine has, all cases."""
    memory = _native.Triad(CORES, TRIAD_BYTES)
    triad: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="hfreduce-bench-") as name,
        Stage(Path(name)) as stage,
        Crews(stage, layout, Path(name), {"HFREDUCE_TRANSPORT": transport}) as crews,
    ):
        listed = crews.with_torch({"hfreduce": "torch", "gloo": "gloo"})
        listed.append(crews.native())
        for peer in peers:
            crew = crews.mpi(peer)
            if crew is None:
                say(f"no {peer}: it is left out (apt-get install {packages(peer)})")
            else:
                listed.append(crew)
        lanes = play(listed, cases, rounds, lambda: triad.append(memory.measure()))
    return Measured(layout.world_size, lanes, triad)


def packages(peer: str) -> str:
    """What Debian calls an MPI, its compiler included."""
    return {"openmpi": "openmpi-bin libopenmpi-dev", "mpich": "mpich libmpich-dev"}[peer]


def say(text: str) -> None:
    """Progress, for people."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def many(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Eight ranks of one machine."""
    cases = [Case("float32", SMALL)]
    if not quick:
        kinds = ("registered", "private")
        cases += [Case(t, LARGE, m) for m in kinds for t in ("float32", "bfloat16")]
    told = measure(Layout.one_node(8), "auto", cases, tuple(MPI), rounds)
    rows: list[Row] = []
    for case in cases:
        if case.size_bytes == LARGE:
            rows += large(told, case)
    small = Case("float32", SMALL)
    rows += latency(told, small, 45.0, 1.0)
    return rows, told.document()


def large(told: Measured, case: Case) -> list[Row]:
    """One type in one kind of memory, beside Gloo, the MPIs and the memory."""
    what = f"8 ranks, 64 MiB {SHORT[case.type]}, {case.memory}"
    registered = case.memory == "registered"
    goals = (15.0, 10.0) if registered else (9.0, 6.0)
    ours = told.of("native", case) or told.of("torch", case)
    if ours is None:
        return [absent(what, "no such memory")]
    rows = [row(what, "ms", [value * 1e3 for value in ours])]
    # Peers have no registered memory: theirs is always the caller's own.
    own = Case(case.type, case.size_bytes)
    gloo = told.of("gloo", own)
    rows.append(beside(f"{what}: x Gloo", ours, gloo, goals[0]))
    mpis = {name: told.of(name, own) for name in MPI}
    if registered:
        known = [values for values in mpis.values() if values]
        better = [min(values) for values in zip(*known, strict=True)] if known else None
        rows.append(beside(f"{what}: x better MPI", ours, better, goals[1]))
        moved = 2 * told.ranks * case.size_bytes
        shares = [moved / speed / taken for speed, taken in zip(told.triad, ours, strict=True)]
        rows.append(row(f"{what}: of 2nS/M", "of limit", shares, 0.85, more=True))
    else:
        rows.append(beside(f"{what}: x Open MPI", ours, mpis["openmpi"], goals[1]))
    return rows


def beside(
    name: str, ours: Sequence[float], theirs: Sequence[float] | None, goal: float | None
) -> Row:
    """A ratio, or why there is none."""
    if theirs is None:
        return absent(name, "peer not installed", goal, more=True)
    return times(name, ours, theirs, goal)


def latency(told: Measured, case: Case, most_us: float, than_open_mpi: float) -> list[Row]:
    """4 KiB: the native call, beside everybody."""
    what = f"{told.ranks} ranks, 4 KiB"
    ours = told.of("native", case)
    assert ours is not None
    return [
        row(f"{what}: native call", "µs", [value * 1e6 for value in ours], most_us),
        beside(f"{what}: x Gloo", ours, told.of("gloo", case), 500.0),
        beside(f"{what}: x Open MPI", ours, told.of("openmpi", case), than_open_mpi),
        beside(f"{what}: x MPICH", ours, told.of("mpich", case), None),
    ]


def through_torch(told: Measured, case: Case, goal_us: float | None) -> list[Row]:
    """What torch and the backend add to the native call."""
    what = f"{told.ranks} ranks, {SIZES[case.size_bytes]}"
    torch, native = told.of("torch", case), told.of("native", case)
    assert torch is not None
    assert native is not None
    added = [(t - n) * 1e6 for t, n in zip(torch, native, strict=True)]
    return [
        row(f"{what}: call through torch", "µs", [value * 1e6 for value in torch]),
        row(f"{what}: torch minus native", "µs", added, goal_us),
    ]


def pair(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """Two ranks of one machine: what a small call costs."""
    case = Case("float32", SMALL)
    told = measure(Layout.one_node(2), "auto", [case], tuple(MPI), rounds)
    return [*latency(told, case, 1.2, 1.0), *through_torch(told, case, 8.0)], told.document()


def tcp(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Two machines that one plays: TCP over the loopback interface."""
    goals = {} if quick else {"float32": 1.0, "bfloat16": 1.2, "float16": 2.0}
    small = Case("float32", SMALL)
    cases = [small, *(Case(kind, LARGE) for kind in goals)]
    told = measure(Layout.two_zones(1, 1), "tcp", cases, (), rounds)
    rows = []
    for kind, goal in goals.items():
        case = Case(kind, LARGE)
        ours = told.of("native", case)
        assert ours is not None
        what = f"TCP, 2 ranks, 64 MiB {SHORT[kind]}"
        rows.append(row(what, "ms", [value * 1e3 for value in ours]))
        rows.append(beside(f"{what}: x Gloo", ours, told.of("gloo", case), goal))
    ours = told.of("native", small)
    assert ours is not None
    rows.append(row("TCP, 2 ranks, 4 KiB", "µs", [value * 1e6 for value in ours], 25.0))
    rows.append(beside("TCP, 2 ranks, 4 KiB: x Gloo", ours, told.of("gloo", small), None))
    return rows, told.document()


PARTS: dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]] = {
    "many": many, "pair": pair, "tcp": tcp,
}  # fmt: skip

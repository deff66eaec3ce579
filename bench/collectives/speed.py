"""Speed of HFReduce, Gloo, Open MPI and MPICH in the same rounds, with the memory bandwidth.

HFReduce through torch is compared with Gloo through torch, the C library with the MPI libraries.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfreduce import _native
from hfreduce.testing import Layout

from bench.collectives.harness import BenchError, Case, Contender, Harness, run_rounds
from bench.collectives.peers import COMMANDS, PACKAGES, TITLES, launches, quickest
from bench.collectives.rank_groups import RankGroups
from bench.collectives.torch_rank import TRAINING_STEP
from bench.report import say
from bench.rows import Row, absent, row, times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PARTS", "Measured", "calls", "many", "pair", "step", "tcp"]

MIB = 1 << 20
LARGE, MIDDLE, SMALL = 64 * MIB, 8 * MIB, 4096
TRIAD_BYTES = 64 * MIB
"""Size of each array: three of them exceed a last-level cache."""
CORES = 2
"""Threads of the triad, as many as the goals are for."""

SIZES = {LARGE: "64 MiB", MIDDLE: "8 MiB", SMALL: "4 KiB"}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
CALLS = (
    "reduce_scatter",
    "allgather",
    "broadcast",
    "alltoall",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "p2p",
)
"""Besides the allreduce; p2p is a round trip in each pair of ranks."""


@dataclass(slots=True)
class Measured:
    """One layout's rounds."""

    ranks: int
    lanes: dict[str, Contender]
    triad: list[float] = field(default_factory=list)
    """Bytes per second, once a round."""

    @property
    def what(self) -> str:
        """The layout in a row's name; fewer cores than ranks mean context switches."""
        cores = os.cpu_count() or 1
        return f"{self.ranks} ranks" + (f" on {cores} cores" if cores < self.ranks else "")

    def of(self, lane: str, case: Case) -> list[float] | None:
        """Seconds of one call, round by round; None if that was not measured."""
        lane_result = self.lanes.get(lane)
        return None if lane_result is None else lane_result.seconds.get(case) or None

    def peer(self, peer: str, case: Case) -> tuple[str, Sequence[float]] | None:
        """The library's quickest configuration in this case, and its rounds."""
        names = [name for name in self.lanes if name.startswith(f"{peer}:")]
        return quickest({name.partition(":")[2]: self.of(name, case) for name in names})

    def better(self, case: Case) -> tuple[str, Sequence[float]] | None:
        """The quickest configuration of all libraries."""
        names = [name for name in self.lanes if ":" in name]
        return quickest({name: self.of(name, case) for name in names})

    def document(self) -> dict[str, Any]:
        """Everything, in microseconds."""
        return {
            "ranks": self.ranks,
            "cores": os.cpu_count(),
            "triad_gbps": [value / 1e9 for value in self.triad],
            "rounds_us": [
                {
                    "group": name, "call": case.call, "type": case.type, "bytes": case.size_bytes,
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
    """All rank groups available on this machine, all cases."""
    memory = _native.Triad(CORES, TRIAD_BYTES)
    triad: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="hfreduce-bench-") as name,
        Harness(Path(name)) as harness,
        RankGroups(harness, layout, Path(name), {"HFREDUCE_TRANSPORT": transport}) as rank_groups,
    ):
        listed = rank_groups.with_torch({"hfreduce": "torch", "gloo": "gloo"})
        listed.append(rank_groups.native())
        for peer in peers:
            for launch in launches(peer, layout.world_size, os.cpu_count() or 1):
                group = rank_groups.mpi(launch)
                if group is None:
                    say(f"no {peer}: it is left out (apt-get install {PACKAGES[peer]})")
                    break
                listed.append(group)
        lanes = run_rounds(listed, cases, rounds, lambda: triad.append(memory.measure()))
    return Measured(layout.world_size, lanes, triad)


def many(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Eight ranks of one machine."""
    cases = [Case("float32", SMALL)]
    if not quick:
        kinds = ("registered", "private")
        cases += [Case(t, LARGE, m) for m in kinds for t in ("float32", "bfloat16")]
    measured = measure(Layout.one_node(8), "auto", cases, tuple(COMMANDS), rounds)
    rows: list[Row] = []
    for case in cases:
        if case.size_bytes == LARGE:
            rows += large(measured, case)
    small = Case("float32", SMALL)
    rows += latency(measured, small, 45.0, 1.0)
    return rows, measured.document()


def large(measured: Measured, case: Case) -> list[Row]:
    """One type in one kind of memory, next to Gloo, the MPIs and the memory."""
    title = f"{measured.what}, 64 MiB {SHORT[case.type]}, {case.memory}"
    registered = case.memory == "registered"
    goals = (15.0, 10.0) if registered else (9.0, 6.0)
    native, torch = measured.of("native", case), measured.of("torch", case)
    if native is None or torch is None:
        return [absent(title, "no such memory")]
    rows = [
        row(f"{title}: native", "ms", [value * 1e3 for value in native]),
        row(f"{title}: through torch", "ms", [value * 1e3 for value in torch]),
    ]
    # Peers have no registered memory: they always use the caller's buffers.
    own = Case(case.type, case.size_bytes)
    rows.append(compared(f"{title}: torch x Gloo", torch, measured.of("gloo", own), goals[0]))
    rows.append(
        compared_with(f"{title}: native x better MPI", native, measured.better(own), goals[1])
    )
    if registered:
        moved = 2 * measured.ranks * case.size_bytes
        shares = [
            moved / speed / seconds for speed, seconds in zip(measured.triad, native, strict=True)
        ]
        rows.append(row(f"{title}: of 2nS/M", "of limit", shares, 0.85, more=True))
    return rows


def compared(
    name: str,
    own: Sequence[float],
    peer: Sequence[float] | None,
    goal: float | None,
    note: str = "",
) -> Row:
    """A ratio, or the reason why it is missing."""
    if peer is None:
        return absent(name, "not measured", goal, more=True)
    return times(name, own, peer, goal, note=note)


def compared_with(
    name: str, own: Sequence[float], peer: tuple[str, Sequence[float]] | None, goal: float | None
) -> Row:
    """The ratio to a library's quickest configuration, which the row names."""
    if peer is None:
        return absent(name, "peer not installed", goal, more=True)
    return compared(name, own, peer[1], goal, peer[0])


def latency(measured: Measured, case: Case, most_us: float, than_open_mpi: float) -> list[Row]:
    """4 KiB: the native call next to the MPIs, the call through torch next to Gloo."""
    subject = f"{measured.what}, 4 KiB"
    native, torch = measured.of("native", case), measured.of("torch", case)
    if native is None or torch is None:
        raise BenchError(f"{subject}: not measured")
    rows = [
        row(f"{subject}: native call", "µs", [value * 1e6 for value in native], most_us),
        row(f"{subject}: call through torch", "µs", [value * 1e6 for value in torch]),
        compared(f"{subject}: torch x Gloo", torch, measured.of("gloo", case), 500.0),
    ]
    for peer, title in TITLES.items():
        goal = than_open_mpi if peer == "openmpi" else None
        rows.append(
            compared_with(f"{subject}: native x {title}", native, measured.peer(peer, case), goal)
        )
    return rows


def added_by_torch(measured: Measured, case: Case, goal_us: float | None) -> Row:
    """Time that torch and the backend add to the native call."""
    native, torch = measured.of("native", case), measured.of("torch", case)
    if native is None or torch is None:
        raise BenchError(f"{case.order}: not measured")
    added = [(t - n) * 1e6 for t, n in zip(torch, native, strict=True)]
    return row(
        f"{measured.what}, {SIZES[case.size_bytes]}: torch minus native", "µs", added, goal_us
    )


def pair(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """Two ranks of one machine: what a small call costs."""
    case = Case("float32", SMALL)
    measured = measure(Layout.one_node(2), "auto", [case], tuple(COMMANDS), rounds)
    rows = [*latency(measured, case, 1.2, 1.0), added_by_torch(measured, case, 8.0)]
    return rows, measured.document()


def calls(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """The other collectives and point-to-point, next to every peer."""
    sizes = (SMALL,) if quick else (SMALL, MIDDLE)
    cases = [
        Case("float32", size, call=call)
        for call in CALLS
        for size in (sizes if call != "barrier" else (SMALL,))
    ]
    rows: list[Row] = []
    details = {}
    for ranks in (2,) if quick else (2, 8):
        measured = measure(Layout.one_node(ranks), "auto", cases, tuple(COMMANDS), rounds)
        details[str(ranks)] = measured.document()
        for case in cases:
            rows += call_rows(measured, case)
    return rows, details


def call_rows(measured: Measured, case: Case) -> list[Row]:
    """One operation of one size."""
    size = "" if case.call == "barrier" else f", {SIZES[case.size_bytes]}"
    title = f"{measured.what}, {case.call}{size}"
    native, torch = measured.of("native", case), measured.of("torch", case)
    if native is None or torch is None:
        raise BenchError(f"{title}: not measured")
    return [
        row(f"{title}: native", "µs", [value * 1e6 for value in native]),
        compared(f"{title}: torch x Gloo", torch, measured.of("gloo", case), 1.0),
        compared_with(f"{title}: native x better MPI", native, measured.better(case), 1.0),
    ]


def step(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """A whole training step under DDP: the effect of the collectives' ratios on it."""
    case = Case("float32", 0, call=TRAINING_STEP)
    rows: list[Row] = []
    details = {}
    for ranks in (2,) if quick else (2, 8):
        measured = measure(Layout.one_node(ranks), "auto", [case], (), rounds)
        details[str(ranks)] = measured.document()
        torch = measured.of("torch", case)
        if torch is None:
            raise BenchError("no training step was measured")
        title = f"{measured.what}, step of the example under DDP"
        rows.append(row(title, "ms", [value * 1e3 for value in torch]))
        rows.append(compared(f"{title}: x Gloo", torch, measured.of("gloo", case), 1.0))
    return rows, details


def tcp(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Two simulated machines: TCP over the loopback interface, both through torch."""
    goals = {} if quick else {"float32": 1.0, "bfloat16": 1.2, "float16": 2.0}
    small = Case("float32", SMALL)
    cases = [small, *(Case(kind, LARGE) for kind in goals)]
    measured = measure(Layout.two_zones(1, 1), "tcp", cases, (), rounds)
    rows = []
    for case in cases:
        torch = measured.of("torch", case)
        if torch is None:
            raise BenchError(f"{case.order}: not measured")
        title = f"TCP, 2 ranks, {SIZES[case.size_bytes]} {SHORT[case.type]}"
        if case == small:
            rows.append(row(title, "µs", [value * 1e6 for value in torch], 25.0))
        else:
            rows.append(row(title, "ms", [value * 1e3 for value in torch]))
        goal = None if case == small else goals[case.type]
        rows.append(compared(f"{title}: x Gloo", torch, measured.of("gloo", case), goal))
    return rows, measured.document()


PARTS: dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]] = {
    "many": many, "pair": pair, "calls": calls, "step": step, "tcp": tcp,
}  # fmt: skip

"""Measurements of pipeline parallelism: bubbles without a wire, and steps on one."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from hfreduce.testing import Layout

from bench import netns
from bench.report import say
from bench.rows import Row, absent
from bench.training.pipeline_figures import TORCH, bubble_rows, ideal_seconds, wire_rows
from bench.training.pipeline_models import PipelineModel
from bench.training.pipeline_rank import rank_main
from bench.training.rank import Spec
from bench.training.session import Session
from bench.training.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bubble", "wire"]

RANKS, MICROBATCHES, REPLICAS = 4, 16, 2
LAYER_SECONDS: Final = 0.02
"""Of each third of a layer: long compared with a switch of processes."""
SCHEDULES: Final = ("1F1B", "Eager1F1B", "Interleaved1F1B", "ZBVZeroBubble", TORCH)
ON_WIRE: Final = ("1F1B", "Eager1F1B", TORCH)
SMALL: Final = PipelineModel(RANKS, 1, MICROBATCHES, rows=4, width=64)
LARGE: Final = PipelineModel(RANKS, REPLICAS, MICROBATCHES, rows=1024, width=128)
"""An activation of 512 KiB."""
ZONES: Final = (2, 2)
MEGABITS: Final = 500
BUSY: Final = (0.4, 0.7)
"""Share of time in which an inner node sends, in steady state."""
GOALS: Final = dict(zip(BUSY, (1.06, 1.10), strict=True))
"""Of a step of `Eager1F1B`, compared with one over links without a limit."""
UNLIMITED: Final = ("1F1B", "Eager1F1B")
"""Schedules that are measured over links without a limit, too."""


def bubble(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Four ranks of one node."""
    seconds = LAYER_SECONDS / 4 if quick else LAYER_SECONDS
    with Session(rank_main) as session:
        spec = Spec("pipeline", SMALL, ("hfreduce", "gloo"))
        turns = Turns(session.start(spec, Layout.one_node(RANKS)), compute_seconds=seconds)
        turns.run(SCHEDULES, rounds, once=True)
    details = {"model": asdict(SMALL), "layer_seconds": seconds, "seconds": turns.seconds}
    return bubble_rows(RANKS, MICROBATCHES, seconds, turns.seconds), details


def wire(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Two pipelines over four nodes with one link each; a stage on each node.

    In each round the same steps are measured over links without a limit.
    """
    if why := netns.missing():
        return [absent(_title(busy), why) for busy in BUSY], {}
    rows: list[Row] = []
    details: dict[str, Any] = {}
    with Session(rank_main) as session:
        spec = Spec("pipeline-wire", LARGE, ("hfreduce", "gloo"))
        group = session.start_on_wire(spec, ZONES, REPLICAS, MEGABITS)
        spec = replace(spec, name="pipeline-unlimited")
        unlimited_group = session.start_on_wire(spec, ZONES, REPLICAS, None)
        for busy in BUSY[: 1 if quick else None]:
            seconds = layer_seconds(busy)
            turns = Turns(group, compute_seconds=seconds)
            unlimited = Turns(unlimited_group, compute_seconds=seconds)
            ideal = ideal_seconds(RANKS, MICROBATCHES, seconds)
            say(f"{_title(busy)}: {1e3 * seconds:.1f} ms for a third of a layer")
            turns.start(ON_WIRE, once=True)
            unlimited.start(UNLIMITED, once=True)
            for number in range(rounds):
                turns.round(number)
                unlimited.round(number)
            details[f"busy {busy}"] = {
                "model": asdict(LARGE),
                "megabits": MEGABITS,
                "layer_seconds": seconds,
                "ideal_seconds": ideal,
                "seconds": turns.seconds,
                "seconds without a limit": unlimited.seconds,
            }
            rows += wire_rows(_title(busy), ideal, turns.seconds, unlimited.seconds, GOALS[busy])
    return rows, details


def layer_seconds(busy: float) -> float:
    """A third of a layer's time with which an inner node sends for this share of the time.

    In the time of two layers, six thirds, each of its ranks sends an activation and a gradient.
    """
    sent_bytes = 2 * LARGE.replicas * LARGE.rows * LARGE.width * 4
    return sent_bytes * 8 / (MEGABITS * 1e6) / busy / 6


def _title(busy: float) -> str:
    return f"4 nodes x 2, busy {100 * busy:.0f} %"


def names() -> Sequence[str]:
    """Of all rows on the wire, for the test of the table."""
    return [_title(busy) for busy in BUSY]

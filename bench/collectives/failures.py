"""Time until the survivors of 32 ranks report a failed rank, and whether they name it.

Every round starts new ranks that call allreduce repeatedly. Then one rank is killed or stopped,
one connection between two machines is cut, or one machine's cable is pulled. The benchmark measures
the time from the fault to the error that each survivor raises in Python, and checks the rank that
the error names. Machines are network namespaces where that is allowed (root); elsewhere all of them
share the loopback interface and no cable can be pulled.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.collectives.fault_ranks import (
    LIVENESS_SECONDS,
    OPERATION_SECONDS,
    RANKS,
    Machines,
    Round,
)
from bench.netns import Network
from bench.report import say

GOAL_MS, LOCAL_KILL_GOAL_MS = 1000.0, 100.0
FAULTS = ("killed", "stopped", "cut", "unplugged")
LAYOUTS = {"4 machines x 8 ranks": 4, "1 machine x 32 ranks": 1}


@dataclass
class Heard:
    """The survivors' reports of all rounds with one kind of fault."""

    seconds: list[float] = field(default_factory=list)
    local_seconds: list[float] = field(default_factory=list)
    """Those of them on the machine of the failed rank."""
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Errors that name another rank."""
    silent: int = 0
    """Survivors that raised no error in time."""
    early: int = 0
    """Rounds in which the group failed before the fault: false alarms, without a detection
    time."""


def run_rounds(machines: Machines, fault: str, chance: random.Random, observed: Heard) -> None:
    """Runs one round: starts the ranks, injects the fault and collects the survivors' reports."""
    with tempfile.TemporaryDirectory(prefix="hfreduce-failures-") as folder:
        story = Round(machines, Path(folder))
        unplugged: int | None = None
        try:
            story.meet()
            # Inject the fault at a random point of the operation.
            story.collect({0}, 0.3 + chance.random() * 0.2)
            if story.failed:
                observed.early += 1
                return
            victim = chance.randrange(RANKS)
            right, survivors = {victim}, set(range(RANKS)) - {victim}
            local = {rank for rank in survivors if machines.of(rank) == machines.of(victim)}
            fault_at = time.monotonic()
            if fault == "cut":
                ends = chance.choice(sorted(story.pairs))
                right, survivors, local = set(ends), set(range(RANKS)), set()
                story.lines[ends[0]].send(story.pairs[ends])
            elif fault == "unplugged":
                unplugged = machines.of(victim)
                right, survivors = local | {victim}, survivors - local
                local = set()
                machines.cable(unplugged, "down")
            else:
                number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
                os.kill(story.children[victim], number)
            story.collect(survivors, OPERATION_SECONDS / 2)
            fault_at = story.cut_at or fault_at
        finally:
            story.end()
            if unplugged is not None:
                machines.cable(unplugged, "up")
        for rank in survivors:
            if rank not in story.failed:
                observed.silent += 1
                continue
            at, peer, kind, text = story.failed[rank]
            observed.kinds[kind] += 1
            observed.seconds.append(at - fault_at)
            if rank in local:
                observed.local_seconds.append(at - fault_at)
            if peer not in right:
                observed.wrong.append(text)


def milliseconds(seconds: list[float]) -> dict[str, float] | None:
    """Median, 99th percentile and maximum."""
    if len(seconds) < 2:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3, "max": max(seconds) * 1e3}


def row(layout: str, fault: str, rounds: int, observed: Heard) -> dict[str, Any]:
    """The figures of one kind of fault."""
    return {
        "layout": layout,
        "fault": fault,
        "rounds": rounds,
        "errors": len(observed.seconds),
        "kinds": dict(observed.kinds),
        "wrong": len(observed.wrong),
        "wrong_texts": observed.wrong[:3],
        "silent": observed.silent,
        "failed_before": observed.early,
        "liveness_seconds": LIVENESS_SECONDS,
        "ms": milliseconds(observed.seconds),
        "same_machine_ms": milliseconds(observed.local_seconds),
    }


def measure(rounds: int, seed: int, only: list[str]) -> list[dict[str, Any]]:
    """All layouts and faults."""
    entries = []
    chance = random.Random(seed)
    root = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    for layout, count in LAYOUTS.items():
        with contextlib.ExitStack() as stack:
            network = None
            if root and count > 1:
                # Root in a container may not make namespaces.
                try:
                    network = stack.enter_context(Network([count // 2, count // 2], 10_000))
                except RuntimeError as why:
                    say(f"no cable is pulled: {why}")
            machines = Machines(count, network)
            for fault in only:
                if (fault == "cut" and count == 1) or (fault == "unplugged" and network is None):
                    continue
                observed = Heard()
                for _ in range(rounds):
                    run_rounds(machines, fault, chance, observed)
                entries.append(row(layout, fault, rounds, observed))
    return entries

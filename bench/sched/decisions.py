"""Cost of one scheduling decision: processor time of `step` with a full cluster and a long queue.

`python -m bench.sched.decisions`: nodes that are all in use, and queued jobs of which some were
preempted, so that they keep their previous nodes. `--reference DIR` measures the engine under
another source tree in the same run, one event of each in turn, and prints the ratio. The processor
time of the process is measured, so that other load on the machine shifts it little.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flyer.api import Checkpoint, FlyerJob, FlyerJobStatus, JobHistory, Pending, Phase, PreviousNode
from flyer.engine import (
    EngineState,
    GangStarted,
    JobSubmitted,
    Node,
    NodeEmptied,
    NodeLost,
    PodExited,
    ProgressReported,
    Succeeded,
    Tick,
    rebuild,
    step,
)
from flyer.sim.samples import sample_job

from bench.report import OUTPUT, ROOT, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine import Event

__all__ = ["Cluster", "main"]

_KINDS = ("tick", "progress", "submission", "end of a job", "node loss")
_NOW = 1_800_000_000.0
_GANG = 8
_USERS = 50


class Cluster:
    """A cluster without a free node, and its queue."""

    def __init__(self, nodes: int, queued: int, preempted: int) -> None:
        self.now = _NOW
        half = nodes // 2
        node_objects = [
            Node(f"n{index}", "A" if index < half else "B", f"l{index // 40}", slots=8)
            for index in range(nodes)
        ]
        self.state: EngineState = rebuild(node_objects, (), self.now, 1)
        running = [self._job(f"r{index}", _GANG) for index in range(nodes // _GANG)]
        self.step(*(JobSubmitted(job) for job in running))
        self.step(*(GangStarted(key, 1) for key, job in self.state.jobs.items() if job.holding))
        waiting = [self._waiting(index, half, ran=index < preempted) for index in range(queued)]
        self.step(*(JobSubmitted(job) for job in waiting))
        self._count = 0

    def step(self, *events: Event) -> float:
        """One step a second later; its processor time in milliseconds."""
        self.now += 1
        started = time.process_time()
        self.state, _ = step(self.state, events or (Tick(),), self.now)
        return (time.process_time() - started) * 1000

    def event(self, kind: str) -> Sequence[Event]:
        """The next event of a kind."""
        self._count += 1
        if kind == "progress":
            return [ProgressReported("default/r0", 1, self._count)]
        if kind == "submission":
            return [JobSubmitted(self._job(f"new{self._count}", 4))]
        if kind == "end of a job":
            job = next(
                running
                for running in self.state.jobs.values()
                if running.status.phase is Phase.RUNNING
            )
            nodes = [node.name for node in job.status.occupied]
            attempt = job.status.history.attempt
            return [PodExited(job.key, attempt, name, Succeeded()) for name in nodes] + [
                NodeEmptied(name, job.key, attempt) for name in nodes
            ]
        if kind == "node loss":
            return [NodeLost(f"n{16 + _GANG * self._count}", "PowerLost")]
        return [Tick()]

    def _job(self, name: str, nodes: int) -> FlyerJob:
        user = f"u{sum(map(ord, name)) % _USERS}"
        job = sample_job(name, nodes, user=user, ranksPerNode=8)
        metadata = job.metadata.replace(uid=f"uid-{name}", creation_timestamp=self.now)
        return job.replace(metadata=metadata)

    def _waiting(self, index: int, zone_nodes: int, *, ran: bool) -> FlyerJob:
        size = 2 + index % 7
        job = self._job(f"q{index}", size)
        if not ran:
            return job
        names = [f"n{(index * 7 + place) % zone_nodes}" for place in range(size)]
        history = JobHistory(
            id=job.metadata.uid or "",
            attempt=1,
            submitted_at=_NOW - 1000 + index / 100,
            queued_at=_NOW - 500,
            previous=tuple(PreviousNode(name=name, zone="A") for name in names),
        )
        status = FlyerJobStatus(
            phase=Phase.QUEUED,
            history=history,
            checkpoint=Checkpoint(step=1, time=_NOW - 600, path="/c"),
            pending=Pending(reason="WaitingForNodes", message="it ran before"),
        )
        return job.replace(status=status)


def _serve(nodes: int, queued: int, preempted: int) -> None:
    """Measure one event for each line of standard input."""
    cluster = Cluster(nodes, queued, preempted)
    cluster.step()
    gc.collect()
    gc.freeze()  # as the operator does when it has read the cluster
    print("ready", flush=True)
    for line in sys.stdin:
        print(cluster.step(*cluster.event(line.strip())), flush=True)


class _Engine:
    """A process with the engine of one source tree."""

    def __init__(self, source: Path, sizes: Sequence[int]) -> None:
        numbers = [str(size) for size in sizes]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.sched.decisions", "--serve", *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"},
        )
        self._read()

    def measure(self, kind: str) -> float:
        assert self._process.stdin is not None
        print(kind, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine ended with exit status {self._process.wait()}")
        return line.strip()


def _measure(
    sources: dict[str, Path], sizes: Sequence[int], rounds: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds by kind of event and engine; the engines take turns."""
    engines = {name: _Engine(source, sizes) for name, source in sources.items()}
    try:
        times: dict[str, dict[str, list[float]]] = {}
        for kind in _KINDS:
            for _ in range(rounds):
                for name, engine in engines.items():
                    times.setdefault(kind, {}).setdefault(name, []).append(engine.measure(kind))
        return {
            kind: {name: round(statistics.median(values), 2) for name, values in by.items()}
            for kind, by in times.items()
        }
    finally:
        for engine in engines.values():
            engine.close()


def main() -> None:
    """Print a table, and write `build/bench/decisions.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_250)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--preempted", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reference", type=Path, help="source tree of another engine")
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(*options.serve)
        return
    sources = {"engine": ROOT / "operator" / "src"}
    if options.reference is not None:
        sources["reference"] = options.reference.resolve()
    sizes = (options.nodes, options.queued, options.preempted)
    measured = _measure(sources, sizes, options.rounds)
    print(
        f"{options.nodes} nodes, {options.queued} queued jobs, "
        f"{options.preempted} of them preempted"
    )
    for kind, by in measured.items():
        ratio = f"  {by['reference'] / by['engine']:.1f}x" if "reference" in by else ""
        print(f"{kind:12} " + "  ".join(f"{name} {ms:g} ms" for name, ms in by.items()) + ratio)
    write_json(OUTPUT / "decisions.json", {"sizes": sizes, "milliseconds": measured})


if __name__ == "__main__":
    main()

"""Cost of one scheduling decision, in process: CPU time of `step` with a long queue.

`python -m bench.sched.decisions`: 1,250 nodes that are all in use, 10,000 queued jobs of which
1,000 were preempted (each remembers nodes of its own), one event at a time. The time of the process
is measured, not the wall clock, so that a busy machine shifts it little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from flyer.api import Chain, Checkpoint, FlyerJob, FlyerJobStatus, Pending, Phase, PreviousNode
from flyer.engine import (
    GangStarted,
    JobSubmitted,
    LogObserved,
    Node,
    NodeLost,
    NodeObserved,
    ProgressReported,
    Tick,
    rebuild,
    step,
)
from flyer.sim.samples import sample_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine import EngineState, Event

__all__ = ["Cluster", "main", "measure"]

NOW = 1_800_000_000.0
NODES = 1_250
GANG = 8
REPEATS = 5
_GOALS_MS = {"progress": 5.0, "log line": 5.0, "submission": 50.0, "node loss": 50.0, "tick": 50.0}


class Cluster:
    """A full cluster and its queue."""

    def __init__(self, queued: int, preempted: int, nodes: int = NODES) -> None:
        self.now = NOW
        known = [
            Node(f"n{index}", "A" if index < nodes // 2 else "B", f"l{index // 40}", slots=8)
            for index in range(nodes)
        ]
        self.state: EngineState = rebuild(known, (), self.now, 1)
        self.tell(*(JobSubmitted(self._job(f"r{one}", GANG)) for one in range(nodes // GANG)))
        self.tell(*(GangStarted(key, 1) for key, job in self.state.jobs.items() if job.holding))
        self.tell(*(JobSubmitted(self._queued(one, one < preempted)) for one in range(queued)))
        self._count = 0

    def tell(self, *events: Event) -> float:
        """One step; its CPU time in milliseconds."""
        self.now += 1
        begun = time.process_time()
        self.state, _ = step(self.state, events or (Tick(),), self.now)
        return (time.process_time() - begun) * 1000

    def event(self, kind: str) -> Sequence[Event]:
        """The next event of a kind."""
        self._count += 1
        match kind:
            case "progress":
                return [ProgressReported("default/r0", 1, self._count)]
            case "log line":
                return [LogObserved("default/r1", 1)]
            case "submission":
                return [JobSubmitted(self._job(f"new{self._count}", 4))]
            case "node loss":
                return [NodeLost(f"n{16 + 8 * self._count}", "PowerLost")]
            case "node":
                node = self.state.nodes[f"n{self._count}"].node
                return [NodeObserved(node)]
            case _:
                return [Tick()]

    def _job(self, name: str, nodes: int) -> FlyerJob:
        job = sample_job(name, nodes, user=f"u{hash_of(name) % 50}", ranksPerNode=8)
        metadata = job.metadata.replace(uid=f"uid-{name}", creation_timestamp=self.now)
        return job.replace(metadata=metadata)

    def _queued(self, index: int, preempted: bool) -> FlyerJob:  # noqa: FBT001 - internal
        size = 2 + index % 7
        job = self._job(f"q{index}", size)
        if not preempted:
            return job
        previous = tuple(
            PreviousNode(name=f"n{(index * 7 + at) % 600}", zone="A") for at in range(size)
        )
        return job.replace(
            status=FlyerJobStatus(
                phase=Phase.QUEUED,
                chain=Chain(
                    id=job.metadata.uid or "",
                    attempt=1,
                    submitted_at=NOW - 1000 + index / 100,
                    queued_at=NOW - 500,
                    previous=previous,
                ),
                checkpoint=Checkpoint(step=1, time=NOW - 600, path="/c"),
                pending=Pending(reason="WaitingForNodes", message="x"),
            )
        )


def hash_of(name: str) -> int:
    """A number that is the same in every process."""
    return sum(map(ord, name))


def measure(queued: int, preempted: int, repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """Median and maximum CPU milliseconds of one step, by kind of event."""
    cluster = Cluster(queued, preempted)
    cluster.tell()
    found = {}
    for kind, goal_ms in _GOALS_MS.items():
        times = [cluster.tell(*cluster.event(kind)) for _ in range(repeats)]
        found[kind] = {
            "median_ms": round(statistics.median(times), 2),
            "max_ms": round(max(times), 2),
            "goal_ms": goal_ms,
        }
    return found


def main() -> None:
    """Print a table, and write `build/bench/decisions.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--preempted", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    found = measure(given.queued, given.preempted, given.repeats)
    print(f"{NODES} nodes, {given.queued} queued jobs, {given.preempted} preempted ones")
    print(f"{'event':12} {'median ms':>10} {'max ms':>10} {'goal ms':>8}")
    for kind, one in found.items():
        print(f"{kind:12} {one['median_ms']:10} {one['max_ms']:10} {one['goal_ms']:8}")
    target = Path("build/bench/decisions.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"queued": given.queued, "preempted": given.preempted, **found}))


if __name__ == "__main__":
    main()

"""Status writes of a long queue: the writes to waiting jobs while others run.

`python -m bench.sched.queuewrites`: a cluster in which jobs end and start all the time, and a queue
behind them, over simulated time. Counts the commits of jobs that wait before and after the step.
The engine alone is driven, so the figures depend on no clock and no machine. Another source tree is
measured with `PYTHONPATH=DIR/operator/src`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import (
    Commit,
    EngineState,
    GangStarted,
    JobRemoved,
    JobSubmitted,
    Node,
    NodeEmptied,
    PodExited,
    Start,
    Stop,
    Succeeded,
    Tick,
    WakeAt,
    rebuild,
    step,
)
from flyer.sim.samples import sample_job

if TYPE_CHECKING:
    from flyer.engine import Action, Event

__all__ = ["Queue", "main"]

_NOW = 1_800_000_000.0
_PRIORITIES = ("low", "normal", "normal", "high")


class Queue:
    """A cluster that is full, `jobs` jobs that wait, and a new one for each that ends."""

    def __init__(self, nodes: int, jobs: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self.now = _NOW
        node_objects = [Node(f"n{index}", "AB"[index % 2], "", slots=8) for index in range(nodes)]
        self.state: EngineState = rebuild(node_objects, (), self.now, 1)
        self._due: list[tuple[float, int, Event]] = []
        self._count = 0
        self.steps = 0
        self.started = 0
        self.writes: Counter[str] = Counter()  # of waiting jobs, by job
        self.bytes_max = 0
        for _ in range(jobs):
            self._submit()
        self._fill = jobs

    def run(self, seconds: float) -> None:
        """Advance the time."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now = max(self.now, self._due[0][0])
            events = []
            while self._due and self._due[0][0] <= self.now:
                events.append(heapq.heappop(self._due)[2])
            self._step([event for event in events if not isinstance(event, Tick)] or [Tick()])
        self.now = until

    def _submit(self) -> None:
        self._count += 1
        name = f"j{self._count}"
        job = sample_job(
            name, self._random.choice((1, 2, 3, 4, 8, 12)), user=f"u{self._count % 20}",
            priority=self._random.choice(_PRIORITIES), ranksPerNode=8, progressDeadline=None,
            activeDeadline=f"{self._random.choice((1, 2, 4))}h",
        )  # fmt: skip
        metadata = job.metadata.replace(
            uid=name, creation_timestamp=self.now, namespace=f"team-{self._count % 7}"
        )
        self._tell(0.0, JobSubmitted(job.replace(metadata=metadata)))

    def _tell(self, seconds: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, event))

    def _step(self, events: list[Event]) -> None:
        before = self.state.jobs
        self.state, actions = step(self.state, events, self.now)
        self.steps += 1
        for action in actions:
            if isinstance(action, Commit):
                previous = before.get(action.job)
                waited = previous is not None and previous.status.phase is Phase.QUEUED
                if waited and action.status.phase is Phase.QUEUED:
                    self.writes[action.job] += 1
                    size = len(json.dumps(action.status.to_object()))
                    self.bytes_max = max(self.bytes_max, size)
            self._answer(action)

    def _answer(self, action: Action) -> None:
        if isinstance(action, Start):
            self.started += 1
            job, attempt = action.job, action.attempt
            self._tell(20.0, GangStarted(job, attempt))
            ends = self._random.uniform(120, 3600)
            for node in action.assignment.names:
                self._tell(ends, PodExited(job, attempt, node, Succeeded()))
            self._tell(ends + 15, JobRemoved(job))
            self._tell(ends, Tick())
            self._submit()
        elif isinstance(action, Stop):
            for node in action.nodes:
                self._tell(1.0, NodeEmptied(node, action.job, action.attempt))
        elif isinstance(action, WakeAt):
            self._tell(max(0.0, action.time - self.now), Tick())


def main() -> None:
    """Print a line for each length of the queue."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 300, 1_000])
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {}
    for jobs in options.jobs:
        queue = Queue(options.nodes, jobs)
        queue.run(60)  # each is given its reason for waiting once
        queue.writes.clear()
        queue.run(options.minutes * 60)
        writes = sum(queue.writes.values())
        result[jobs] = {
            "writesPerSecond": round(writes / options.minutes / 60, 2),
            "writesPerJobAndMinute": round(writes / jobs / options.minutes, 2),
            "largestStatusBytes": queue.bytes_max,
            "starts": queue.started,
            "steps": queue.steps,
        }
        print(jobs, result[jobs], flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""Observer of the scheduler during the scenario, for the display and the summary."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyer.client import EventView, FlyerError, JobView, NodeView

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.client import Client

EVENTS_SHOWN = 200
WAIT_BEAT_SECONDS = 0.02


class DemoError(Exception):
    """The demo cannot continue; the message has the expected and the observed state."""


@dataclass
class Seen:
    """The newest view of everything, and what must not be forgotten."""

    jobs: dict[str, JobView] = field(default_factory=dict)
    nodes: list[NodeView] = field(default_factory=list)
    events: deque[EventView] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    checkpoints: list[tuple[float, str, int]] = field(default_factory=list)
    storage: dict[str, Any] = field(default_factory=dict)


class Observer:
    """A thread that reads the driver's stream; `seen` is replaced piecewise, never half written."""

    def __init__(self, client: Client) -> None:
        self.client, self.seen = client, Seen()
        self.trouble: Exception | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def job(self, name: str) -> JobView | None:
        """The job of this name in the default namespace, if the driver has reported it."""
        return self.seen.jobs.get(f"default/{name}")

    def step(self, name: str) -> int:
        """The last step that a job reported; 0 before the first."""
        job = self.job(name)
        return job.progress.step if job and job.progress else 0

    def wait(self, description: str, timeout_seconds: float, condition: Callable[[], bool]) -> None:
        """Waits for a condition on what was seen.

        Raises:
            DemoError: the time is over, or a job failed meanwhile.
        """
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            failed = [job for job in self.seen.jobs.values() if job.state == "Failed"]
            if failed:
                words = failed[0].failure.traceback if failed[0].failure else failed[0].message
                raise DemoError(
                    f"while waiting for {description}: job {failed[0].key} failed\n{words}"
                )
            if self.trouble is not None:
                raise DemoError(
                    f"while waiting for {description}: {self.trouble}"
                ) from self.trouble
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{description}: not seen within {timeout_seconds:g} s; {self._summary()}"
                )
            time.sleep(WAIT_BEAT_SECONDS)

    def _summary(self) -> str:
        jobs = [
            f"{j.key} is {j.state} at step {self.step(j.name)}" for j in self.seen.jobs.values()
        ]
        return "; ".join(jobs) or "no job was seen"

    def _follow(self) -> None:
        try:
            for item in self.client.watch(since=0):
                if item.event is not None:
                    self._note(item.event)
                if item.job is not None:
                    self._take(item.job)
                if item.nodes is not None:
                    self.seen.nodes = item.nodes
        except (FlyerError, OSError) as error:
            self.trouble = error

    def _take(self, job: JobView) -> None:
        self.seen.jobs[job.key] = job
        if job.progress is not None:
            metrics = job.progress.metrics
            if "loss" in metrics:
                self.seen.losses.setdefault(job.name, {})[job.progress.step] = metrics["loss"]
            if rate := metrics.get("allreduce_gigabytes_per_second"):
                self.seen.rates.setdefault(job.name, []).append(rate)
        known_checkpoints = {(name, step) for _, name, step in self.seen.checkpoints}
        checkpoint = job.checkpoint
        if (
            checkpoint
            and checkpoint.durable
            and (job.name, checkpoint.step) not in known_checkpoints
        ):
            when = checkpoint.time or time.time()
            self.seen.checkpoints.append((when, job.name, checkpoint.step))

    def _note(self, event: EventView) -> None:
        self.seen.events.append(event)
        self.seen.reasons[event.reason] = self.seen.reasons.get(event.reason, 0) + 1

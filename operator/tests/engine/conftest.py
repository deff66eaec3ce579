"""Engine harness: a test steps the engine by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerJob, FlyerJobStatus
from flyer.engine import (
    Action,
    Commit,
    Event,
    GangStarted,
    JobSubmitted,
    Node,
    NodeEmptied,
    SchedulerSettings,
    Tick,
    rebuild,
    step,
)
from flyer.sim import sample_job, two_zones

if TYPE_CHECKING:
    from collections.abc import Callable

T0 = 1_800_000_000.0


class EngineHarness:
    """The engine, its time, and the actions of all steps."""

    def __init__(self, nodes: list[Node], settings: SchedulerSettings) -> None:
        self.settings = settings
        self.nodes = nodes
        self.now = T0
        self.state = rebuild(nodes, (), T0, 1, settings)
        self.jobs: dict[str, FlyerJob] = {}
        self.steps: list[tuple[float, tuple[Event, ...], tuple[Action, ...]]] = []

    def step(self, *events: Event) -> tuple[Action, ...]:
        self.state, actions = step(self.state, events or (Tick(),), self.now)
        self.steps.append((self.now, events or (Tick(),), actions))
        return actions

    def wait(self, seconds: float) -> tuple[Action, ...]:
        self.now += seconds
        return self.step()

    def submit(self, name: str, nodes: int = 1, **spec: Any) -> tuple[Action, ...]:
        job = sample_job(name, nodes, **spec)
        self.jobs[job.key] = job
        return self.step(JobSubmitted(job))

    def run(self, name: str, nodes: int = 1, **spec: Any) -> FlyerJobStatus:
        """Submit a job and start it."""
        self.submit(name, nodes, **spec)
        return self.up(name)

    def up(self, name: str) -> FlyerJobStatus:
        self.step(GangStarted(f"default/{name}", self.status(name).history.attempt))
        return self.status(name)

    def empty(self, name: str) -> tuple[Action, ...]:
        """Report every node empty that the job has to leave."""
        stops = self.state.jobs[f"default/{name}"].sent_actions.stops
        return self.step(
            *(
                NodeEmptied(node.name, f"default/{name}", node.attempt)
                for node in self.status(name).occupied
                if node.name in stops
            )
        )

    def status(self, name: str) -> FlyerJobStatus:
        return self.state.jobs[f"default/{name}"].status

    def names(self, name: str) -> tuple[str, ...]:
        assignment = self.status(name).assignment
        return assignment.names if assignment else ()

    def restart(self) -> None:
        """Rebuild the engine from the committed statuses."""
        statuses: dict[str, FlyerJobStatus] = {}
        for _, _, actions in self.steps:
            for action in actions:
                if isinstance(action, Commit):
                    statuses[action.job] = FlyerJobStatus.model_validate(action.status.to_object())
        stored = [job.replace(status=statuses.get(key)) for key, job in self.jobs.items()]
        self.state = rebuild(self.nodes, stored, self.now, self.state.epoch + 1, self.settings)


@pytest.fixture
def new_harness() -> Callable[..., EngineHarness]:
    """Make a harness: by default two zones of three nodes, and preemption without delay."""

    def make(nodes: list[Node] | None = None, **settings: Any) -> EngineHarness:
        return EngineHarness(
            two_zones() if nodes is None else nodes,
            SchedulerSettings(**{"preemption_delay_seconds": 0.0, **settings}),
        )

    return make


def pick(actions: tuple[Action, ...], *kinds: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kinds)]


@pytest.fixture(name="pick")
def pick_fixture() -> Callable[..., list[Any]]:
    """The actions of these kinds."""
    return pick

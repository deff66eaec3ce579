"""Random driver of the engine: a small cluster that answers each action, in random order.

After each step the invariants of the state and of the nodes are checked.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from flyer.api import FlyerJob, FlyerJobStatus, Phase, illegal
from flyer.engine import (
    Commit,
    EngineState,
    Event,
    GangStarted,
    JobRemoved,
    JobSubmitted,
    Node,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    NodeRemoved,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    SchedulerSettings,
    Start,
    StartFailed,
    StartPending,
    StartRefused,
    Stop,
    TeamObserved,
    rebuild,
    step,
)
from flyer.sim.invariants import Violation
from flyer.sim.necessity import preempted_in_vain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine import Action

__all__ = ["SETTINGS", "RandomCluster", "is_over"]

SETTINGS = SchedulerSettings(
    failure_window_seconds=2.0,
    start_deadline_seconds=20.0,
    stop_retry_seconds=2.0,
    stop_deadline_seconds=10.0,
    same_zone_layout_seconds=5.0,
    refused_backoff_seconds=3.0,
    refused_backoff_seconds_max=6.0,
    refusal_cooldown_seconds=6.0,
    refusal_cooldown_seconds_max=6.0,
    backoff_seconds_max=4.0,
    time_slice_seconds=60.0,
    unsaved_slices=2,
    preemption_delay_seconds=0.2,
)
_RESERVING = (Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING)
_OF_OBJECTS = (
    JobSubmitted, JobRemoved, NodeObserved, NodeLost, NodeRemoved, QuotaObserved, QuotaRemoved,
)  # fmt: skip


class RandomCluster:
    """Nodes, stored objects and pods, and the state of the engine that schedules them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)  # noqa: S311 - a simulation's
        self.now = 1_800_000_000.0
        self.nodes = self._make_nodes()
        self.quotas: dict[str, Quota] = {}
        self.store: dict[str, FlyerJob] = {}
        self.pods: set[tuple[str, int, str]] = set()  # job, attempt, node
        self.refusing: set[str] = set()  # jobs whose pods are refused
        self._inbox: list[Event] = []
        self.epoch = 1
        self.teams: dict[str, str] = {}
        self.state: EngineState = rebuild(self.nodes.values(), (), self.now, 1, SETTINGS)

    def _make_nodes(self) -> dict[str, Node]:
        nodes = {}
        for node_class in ("a100", "v100")[: self._random.randint(1, 2)]:
            for zone in "AB"[: self._random.randint(1, 2)]:
                for index in range(self._random.randint(1, 3)):
                    name = f"{node_class[0]}{zone.lower()}{index}"
                    nodes[name] = Node(name, zone, f"{zone}{index // 2}", node_class, 2)
        return nodes

    def _advance(self, seconds: float) -> int:
        """Advance the time; the driver answers the engine's actions until none remain."""
        self.now += seconds
        events = self._take()
        for steps in range(1, 40):
            self._step(events)
            if not self._inbox:
                return steps
            self.now += 0.05
            events = self._take()
        raise Violation("the engine does not converge")

    def _take(self) -> list[Event]:
        """The arrived events. Only reports of different pods may be reordered."""
        events, self._inbox = self._inbox, []
        if self._random.random() < 0.2:
            objects = [event for event in events if isinstance(event, _OF_OBJECTS)]
            reports = [item for item in events if not isinstance(item, _OF_OBJECTS)]
            self._random.shuffle(reports)
            return objects + reports
        return events

    def _step(self, events: Sequence[Event]) -> None:
        before = self.state
        self.state, actions = step(before, events, self.now)
        if why := preempted_in_vain(before, self.state):
            raise Violation(why)
        for action in actions:
            self._do(action)
        self._check()

    def _do(self, action: Action) -> None:
        match action:
            case Commit(job, status):
                self._commit(job, status)
            case Start():
                self._start(action)
            case Stop(job, attempt, nodes):
                for name in nodes:
                    self.pods.discard((job, attempt, name))
                    if self._stands(name):
                        self._inbox.append(NodeEmptied(name, job, attempt))
            case _:
                pass

    def _commit(self, key: str, status: FlyerJobStatus) -> None:
        stored = self.store.get(key)
        if stored is None:
            return  # the object was deleted
        if stored.status is not None and (why := illegal(stored.status, status)):
            raise Violation(f"{key}: the API server would refuse this commit: {why}")
        self.store[key] = stored.replace(status=status)

    def _start(self, start: Start) -> None:
        key, attempt, names = start.job, start.attempt, start.assignment.names
        if len(names) != self.state.jobs[key].spec.nodes:
            raise Violation(f"{key} starts in part: {names}")
        for other, number, name in self.pods:
            if name in names and (other, number) != (key, attempt):
                raise Violation(f"{key} starts on {name}, which {other} still occupies")
        if key in self.refusing:
            self._inbox.append(StartRefused(key, attempt, "a quota is full"))
            return
        fate = self._random.random()
        if fate < 0.06:
            self._inbox.append(StartFailed(key, attempt, "no sandbox", names[:1]))
        elif fate < 0.1:
            self._inbox.append(StartFailed(key, attempt, "no image", names, job_fault=True))
        elif fate < 0.15:
            self._inbox.append(StartPending(key, attempt, names[-1:]))
        else:
            self._inbox.append(GangStarted(key, attempt))
        self.pods |= {(key, attempt, name) for name in names}

    def _stands(self, name: str) -> bool:
        state = self.state.nodes.get(name)
        return state is None or not state.lost

    def _crash(self) -> None:
        """Restart the scheduler from the stored objects; the driver reports its observations."""
        self.epoch += 1
        states = self.state.nodes
        nodes = [states[name].node if name in states else node for name, node in self.nodes.items()]
        # `Simulation` tests the round trip of objects through their text.
        jobs = [job for job in self.store.values() if not is_over(job)]
        self.state = rebuild(
            nodes, jobs, self.now, self.epoch, SETTINGS, self.quotas.values(), teams=self.teams
        )
        self._inbox = [
            event
            for event in self._inbox
            if isinstance(event, (JobRemoved, QuotaRemoved, TeamObserved))
        ]
        for name, state in states.items():
            if state.lost:
                self._inbox.append(NodeLost(name, "PowerLost"))
        self.pods = {pod for pod in self.pods if pod[0] in self.store}
        for job in jobs:
            self._inbox += self._sight(job)

    def _sight(self, job: FlyerJob) -> list[Event]:
        status = job.status
        if status is None:
            return [JobSubmitted(job)]
        events: list[Event] = []
        attempt = status.history.attempt
        for occupied_node in status.occupied:
            lives = (job.key, occupied_node.attempt, occupied_node.name) in self.pods
            to_start = status.phase is Phase.STARTING and occupied_node.attempt == attempt
            if not lives and not to_start and self._stands(occupied_node.name):
                events.append(NodeEmptied(occupied_node.name, job.key, occupied_node.attempt))
        return events

    def _check(self) -> None:
        owner: dict[str, str] = {}
        crossing = []
        for key, job in self.state.jobs.items():
            status = job.status
            if status.phase not in _RESERVING or status.assignment is None:
                continue
            for name in status.assignment.names:
                if name in owner:
                    raise Violation(f"{name} is reserved for {owner[name]} and {key}")
                owner[name] = key
            if len(status.assignment.zones) > 1:
                crossing.append(key)
        if len(crossing) > 1:
            raise Violation(f"{crossing} cross zones at once")
        live: dict[str, tuple[str, int]] = {}
        for pod_job, attempt, name in self.pods:
            occupant = live.setdefault(name, (pod_job, attempt))
            if occupant != (pod_job, attempt) and self._stands(name):
                raise Violation(f"{name} serves {occupant} and {(pod_job, attempt)}")
        for key, job in self.state.jobs.items():
            stored = self.store.get(key)
            if stored is not None and not job.removed and stored.status != job.status:
                raise Violation(f"{key}: the state is not what is stored")


def is_over(job: FlyerJob) -> bool:
    """Whether the job has ended and occupies no node."""
    status = job.status
    ended = status is not None and status.phase in (Phase.SUCCEEDED, Phase.FAILED)
    return ended and status is not None and not status.occupied

"""Caches between steps and skipped jobs of a queue change no decision."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from flyer.api import Phase, Priority
from flyer.engine import (
    CheckpointReported,
    EngineState,
    GangStarted,
    JobRemoved,
    JobSubmitted,
    Killed,
    Node,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    PodExited,
    ProgressReported,
    Released,
    ResumeRequested,
    StartFailed,
    StartRefused,
    StreamLost,
    StreamRestored,
    Succeeded,
    SuspendReceived,
    SuspendRequested,
    Tick,
    rebuild,
    step,
)
from flyer.engine.cycle import queue, schedule
from flyer.engine.cycle.queue import Walk
from flyer.engine.cycle.schedule import UnschedulableNeeds
from flyer.engine.events import QuotaObserved, QuotaRemoved
from flyer.engine.explain import pending_reasons
from flyer.engine.explain.pending_reasons import PendingReasonCache
from flyer.engine.state.cycle_state import CycleState
from flyer.engine.state.quotas import Quota
from flyer.sim.samples import sample_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flyer.api import Pending
    from flyer.engine import Action, Event, JobState
    from flyer.engine.placement.reservations import Reservation
    from flyer.engine.state.queue import Entry

_PRIORITIES = ("low", "normal", "high", "very-high")


class History:
    """A cluster with a queue far longer than its capacity, and random events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1_800_000_000.0
        self.jobs = 0
        zones = self.random.choice((1, 2, 3))
        self.nodes = [
            Node(
                f"n{index}", "ABC"[index % zones], f"l{index // 8}",
                node_class="b" if self.random.random() < 0.2 else "a", slots=8,
            )
            for index in range(self.random.choice((12, 24)))
        ]  # fmt: skip
        self.quotas = []
        if seed % 2:
            self.quotas = [
                Quota(
                    f"q{index}", self.random.choice(("*", "u1", "u2")),
                    self.random.choice(("*", "*", "high")), nodes=self.random.randint(2, 8),
                )
                for index in range(self.random.randint(1, 3))
            ]  # fmt: skip

    def first(self) -> EngineState:
        return rebuild(self.nodes, (), self.now, 1, quotas=self.quotas)

    def submissions(self, count: int) -> Iterator[Event]:
        choose, chance = self.random.choice, self.random.random
        for _ in range(count):
            self.jobs += 1
            wishes: dict[str, object] = {"priority": choose(_PRIORITIES)}
            if self.quotas and chance() < 0.3:
                wishes["priority"] = "auto"
            if chance() < 0.3:
                wishes["activeDeadline"] = choose(("10m", "1h", "3h"))
            if chance() < 0.2:
                wishes["nodeClass"] = choose(("a", "b"))
            if chance() < 0.2:
                wishes["crossZone"] = "Never"
            if chance() < 0.5:
                wishes["progressDeadline"] = choose(("1m", "5m"))
            size = choose((1, 1, 2, 3, 4, 8))
            user = f"u{self.random.randint(0, 3)}"
            job = sample_job(f"j{self.jobs}", size, user=user, ranksPerNode=8, **wishes)
            metadata = job.metadata.replace(uid=f"uid{self.jobs}", creation_timestamp=self.now)
            yield JobSubmitted(job.replace(metadata=metadata))

    def events(self, state: EngineState) -> list[Event]:
        events: list[Event] = []
        for job in state.jobs.values():
            events += self.of_job(job)
        for name, node_state in state.nodes.items():
            if node_state.eligible and self.random.random() < 0.01:
                events.append(NodeLost(name, "PowerLost"))
            elif node_state.lost and self.random.random() < 0.3:
                events.append(NodeObserved(next(node for node in self.nodes if node.name == name)))
        if self.quotas and self.random.random() < 0.1:
            quota = self.random.choice(self.quotas)
            events.append(self.random.choice((QuotaRemoved(quota.name), QuotaObserved(quota))))
        if self.random.random() < 0.4:
            events += self.submissions(self.random.randint(1, 5))
        self.random.shuffle(events)
        return events or [Tick()]

    def of_start(self, key: str, attempt: int, nodes: tuple[str, ...]) -> Iterator[Event]:
        chance = self.random.random()
        if chance < 0.6:
            yield GangStarted(key, attempt)
        elif chance < 0.65:
            yield StartRefused(key, attempt, "no")
        elif chance < 0.7:
            yield StartFailed(job=key, attempt=attempt, reason="bad", nodes=nodes[:1])

    def of_job(self, job: JobState) -> Iterator[Event]:
        status, chance = job.status, self.random.random()
        attempt, phase = status.history.attempt, status.phase
        nodes = status.assignment.names if status.assignment else ()
        if phase is Phase.STARTING:
            yield from self.of_start(job.key, attempt, nodes)
        elif phase is Phase.RUNNING and chance < 0.06:
            yield from (PodExited(job.key, attempt, name, Succeeded()) for name in nodes)
        elif phase is Phase.RUNNING and chance < 0.2:
            yield CheckpointReported(job.key, attempt, int(self.now) % 100_000, "/c")
        elif phase is Phase.RUNNING and chance < 0.3:
            yield ProgressReported(job.key, attempt, int(self.now) % 100_000)
        elif phase is Phase.RUNNING and chance < 0.5:
            is_lost = job.observed.stream_lost_at is not None
            yield (StreamRestored if is_lost else StreamLost)(job.key, attempt)
        elif phase is Phase.RUNNING and chance < 0.52:
            yield PodExited(job.key, attempt, nodes[0], Killed(9, "gone"))
        elif phase is Phase.SUSPENDING and chance < 0.6:
            yield SuspendReceived(job.key, attempt)
            yield Released(job.key, attempt)
        elif phase is Phase.QUEUED and chance < 0.01:
            yield JobRemoved(job.key)
        elif phase is Phase.QUEUED and chance < 0.02:
            yield SuspendRequested(job.key)
        elif phase is Phase.SUSPENDED and chance < 0.2:
            yield ResumeRequested(job.key)
        if status.occupied and phase in (Phase.QUEUED, Phase.SUSPENDING, Phase.SUCCEEDED):
            yield from (NodeEmptied(node.name, job.key, node.attempt) for node in status.occupied)


def _forgetful(state: EngineState) -> EngineState:
    """The state without what only saves work."""
    return replace(
        state, queue=None, queue_changes=(), active=None, remedies={}, skip_until={}, terms={}
    )


_entry = queue._Update._entry


def _auto_jobs_alone(update: queue._Update, job: JobState) -> Entry:
    """Each job passes through its levels separately."""
    entry = _entry(update, job)
    return replace(entry, class_key=None) if job.spec.priority is Priority.AUTO else entry


def _decided(state: EngineState, actions: tuple[Action, ...]) -> tuple[object, ...]:
    """The decisions, without the pending reasons."""
    statuses = {
        key: job.status.replace(
            pending=None, conditions=(), reason="", message="", observed_generation=None
        )
        for key, job in state.jobs.items()
    }
    events = [
        action for action in actions if type(action).__name__ not in ("Commit", "Stop", "WakeAt")
    ]
    stops = [
        (action.job, action.attempt, action.nodes, action.kill)
        for action in actions
        if type(action).__name__ == "Stop"
    ]
    return statuses, events, stops


@pytest.mark.parametrize("seed", range(10))
def test_cached_plans_and_skipped_jobs_change_no_decision(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = []
    skip = Walk.skip
    monkeypatch.setattr(Walk, "skip", lambda walk: (skipped.append(walk), skip(walk))[1])
    history = History(seed)
    quick = slow = history.first()
    events = list(history.submissions(60))
    for _ in range(40):
        history.now += history.random.choice((0.1, 0.6, 1.0, 5.0, 30.0, 120.0))
        with monkeypatch.context() as short:
            short.setattr(schedule, "_HEAD_JOBS", 0)
            quick, actions = step(quick, events, history.now)
        with monkeypatch.context() as long:
            long.setattr(schedule, "_HEAD_JOBS", 10_000)
            long.setattr(
                UnschedulableNeeds, "is_unschedulable", lambda _search, _job, _needs: False
            )
            long.setattr(queue._Update, "_entry", _auto_jobs_alone)
            slow, expected = step(_forgetful(slow), events, history.now)
        assert _decided(quick, actions) == _decided(slow, expected), (seed, history.now)
        events = history.events(quick)
    assert skipped


@pytest.mark.parametrize("seed", range(6))
def test_the_updated_queue_equals_a_rebuilt_one(seed: int) -> None:
    history = History(seed)
    state = history.first()
    events = list(history.submissions(40))
    for _ in range(40):
        history.now += history.random.choice((0.6, 5.0, 70.0))
        state, _ = step(state, events, history.now)
        updated = queue.updated_queue(CycleState(state, history.now))
        anew = queue.updated_queue(
            CycleState(replace(state, queue=None, queue_changes=()), history.now)
        )
        same = replace(anew, explained_to=updated.explained_to, explained_at=updated.explained_at)
        assert updated == same, (seed, history.now)
        events = history.events(state)


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_pending_reason_equals_the_reason_of_each_job(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = PendingReasonCache.of

    def of(
        reasons: PendingReasonCache,
        job: JobState,
        reservations: Sequence[Reservation],
        own: Sequence[Reservation],
        eta: float | None,
    ) -> Pending:
        result = shared(reasons, job, reservations, own, eta)
        assert result == pending_reasons.not_placed(
            reasons._availability, job, reservations, eta
        ), job.key
        return result

    monkeypatch.setattr(PendingReasonCache, "of", of)
    history = History(seed)
    state = history.first()
    events = list(history.submissions(40))
    for _ in range(40):
        history.now += history.random.choice((0.6, 5.0, 70.0))
        state, _ = step(state, events, history.now)
        events = history.events(state)

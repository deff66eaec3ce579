"""Tens of thousands of random histories. A failure prints its seed; FLYER_SEED=N replays it.

The tests marked slow run 20,000 new histories in each `make test`.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from flyer.api import Phase
from flyer.engine import (
    GangStarted,
    JobSubmitted,
    Node,
    Quota,
    rebuild,
    step,
    victim_search,
)
from flyer.engine.cycle import allocate, event_handlers, schedule
from flyer.engine.state import restarts
from flyer.sim import Violation, sample_job
from flyer.sim.histories import History
from flyer.sim.necessity import preempted_in_vain
from flyer.sim.random_cluster import SETTINGS

CHUNK = 500
CHUNKS = 40


def play(count: int, first: int) -> None:
    for seed in range(first, first + count):
        History(seed).run()


def random_seed() -> int:
    return random.SystemRandom().randrange(2**48)


@pytest.mark.skipif("FLYER_SEED" not in os.environ, reason="FLYER_SEED is not set")
def test_the_history_of_flyer_seed() -> None:
    History(int(os.environ["FLYER_SEED"])).run()


def test_the_same_histories_in_every_run() -> None:
    play(60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_new_histories_in_every_run(chunk: int) -> None:
    first = random_seed()
    print(f"chunk {chunk}: seeds {first} to {first + CHUNK - 1}")
    play(CHUNK, first)


def test_a_seed_determines_its_history() -> None:
    first, other = History(7), History(7)
    assert first.run() == other.run()
    assert first.state == other.state


def assert_violation(message: str, seeds: int = 150) -> None:
    with pytest.raises(Violation, match=message):
        play(seeds, 0)


def test_a_job_without_pods_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "resubmit", lambda *_args: None)
    assert_violation("is reserved for|without pods", 131)


def test_a_deadlocked_queue_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule._SchedulingPass, "_needs", lambda *_args: ((), None, ""))
    assert_violation("waits .* although .* are free")


def test_a_starving_job_is_detected_during_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(History, "_settle_down", lambda _history: 0)
    monkeypatch.setattr(schedule._SchedulingPass, "_needs", lambda *_args: ((), None, ""))
    assert_violation("for [0-9.]+ s .* waits .* although .* are free", 2_000)


def test_an_event_of_an_earlier_object_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_handlers, "_is_about_another_object", lambda *_args: False)
    assert_violation("ended by the removal of another object")


def test_a_job_that_waits_for_its_name_forever_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(History, "_offer", lambda history, key: history._inbox.append(
        JobSubmitted(history.store[key])
    ))  # fmt: skip
    assert_violation("the scheduler has lost the job")


def test_a_node_with_two_jobs_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flyer.engine.placement.availability.NodeAvailability._is_open",
        lambda availability, name: availability._may_be_had(name),
    )
    assert_violation("is reserved for")


def test_an_unneeded_preemption_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        victim_search, "cheapest_cover", lambda candidates, need: tuple(candidates) if need else ()
    )
    assert_violation("was preempted by .*, which has other nodes", 600)


def test_a_preemption_without_the_delay_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocate, "_too_early", lambda *_args: False)
    assert_violation("preempts after 0")


def test_a_preemption_despite_free_nodes_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, preemption_delay_seconds=0.0)
    state = rebuild([Node("a0", "A"), Node("a1", "A")], (), 1_800_000_000.0, 1, settings)
    state, _ = step(state, [JobSubmitted(sample_job("low", priority="low"))], 1_800_000_001.0)
    state, _ = step(state, [GangStarted("default/low", 1)], 1_800_000_002.0)
    high = JobSubmitted(sample_job("high", priority="high"))
    after, _ = step(state, [high], 1_800_000_060.0)
    assert preempted_in_vain(state, after) == ""
    monkeypatch.setattr(allocate, "_fit_free", lambda *_args: None)
    monkeypatch.setattr(victim_search, "is_reserved_for_others", lambda *_args: True)
    after, _ = step(state, [high], 1_800_000_060.0)
    assert preempted_in_vain(state, after).endswith("for which ['a1'] were free")


@pytest.mark.parametrize("more", ["node", "quota"])
def test_more_capacity_never_delays_the_head_of_the_queue(more: str) -> None:
    """With another node or a higher quota the first job of the queue still starts."""
    base = random_seed()
    for number in range(200):
        draw = random.Random(base + number)
        nodes = [
            Node(f"{zone}{index}", zone.upper(), slots=2)
            for zone in "ab"
            for index in range(draw.randint(1, 3))
        ]
        quota = Quota("q", "*", "*", "*", draw.randint(1, 6))
        jobs = [
            sample_job(
                f"j{index}", draw.randint(1, 4), user=draw.choice(("anna", "ben")),
                priority=draw.choice(("low", "normal", "high")),
            )
            for index in range(draw.randint(1, 5))
        ]  # fmt: skip
        larger = [*nodes, Node("a9", "A", slots=2)] if more == "node" else nodes
        wider = replace(quota, nodes=quota.nodes + 1) if more == "quota" else quota
        started = []
        for cluster, limit in ((nodes, quota), (larger, wider)):
            state = rebuild(cluster, (), 1_800_000_000.0, 1, SETTINGS, [limit])
            state, _ = step(state, [JobSubmitted(job) for job in jobs], 1_800_000_001.0)
            head = min(jobs, key=lambda job: (-job.spec.priority.level, job.key)).key
            started.append(state.jobs[head].status.phase is Phase.STARTING)
        assert started[0] <= started[1], f"seed {base + number}"

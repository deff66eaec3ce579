"""Scenarios in the simulator, and checks that it detects a broken engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api import Phase, SuspendCode
from flyer.engine import SchedulerSettings, Start
from flyer.engine.cycle.reconcile import reconcile
from flyer.engine.state import transitions
from flyer.sim import Behavior, Script, Simulation, Violation, sample_job, two_zones

if TYPE_CHECKING:
    from flyer.engine.state.cycle_state import CycleState


def starts(simulation: Simulation, key: str) -> list[Start]:
    return [
        action
        for _, _, actions in simulation.history
        for action in actions
        if isinstance(action, Start) and action.job == key
    ]


def test_a_preemption_and_a_node_failure_keep_the_zone_layout() -> None:
    """The scenario of the demo: every attempt has the same distribution over zones."""
    simulation = Simulation(two_zones(), settings=SchedulerSettings(), seed=1)
    simulation.submit(sample_job("a", 4), Script(steps=60))
    simulation.run(15)
    simulation.submit(sample_job("b", 3, priority="high"), Script(steps=20))
    simulation.run(40)
    simulation.lose_node("a1")
    simulation.run(200)
    assert simulation.phase("default/a") is Phase.SUCCEEDED
    assert simulation.phase("default/b") is Phase.SUCCEEDED
    attempts = starts(simulation, "default/a")
    assert [attempt.assignment.zone_layout for attempt in attempts] == [(2, 2)] * 3
    assert [item.assignment.same_zone_layout for item in attempts] == [None, True, True]
    assert attempts[2].assignment.names == ("a0", "a2", "b0", "b1")
    assert simulation.invariants.lost_steps == 0


def test_twenty_kills_lose_less_than_a_checkpoint_interval_each() -> None:
    simulation = Simulation(two_zones(), settings=SchedulerSettings(backoff_seconds=0.1), seed=7)
    simulation.submit(sample_job("a", 4), Script(steps=400, checkpoint_steps=10))
    names = sorted(simulation.cluster.machines)
    for kill in range(20):
        simulation.run(13.0)
        name = names[kill % len(names)]
        if kill % 3 == 0:
            simulation.crash(with_pods=True)
        elif kill % 3 == 1:
            simulation.kill_pod(name)
        else:
            simulation.lose_node(name)
            simulation.run(3.0)
            simulation.return_node(name)
    simulation.run(1000)
    assert simulation.phase("default/a") is Phase.SUCCEEDED
    layouts = {item.assignment.zone_layout for item in starts(simulation, "default/a")}
    assert layouts == {(2, 2)}


@pytest.mark.parametrize("behavior", list(Behavior))
def test_any_preempted_job_releases_its_nodes(behavior: Behavior) -> None:
    simulation = Simulation(two_zones(), settings=SchedulerSettings(), seed=5)
    simulation.submit(sample_job("a", 6), Script(steps=100, behavior=behavior))
    simulation.run(15)
    simulation.submit(sample_job("b", 6, priority="high"), Script(steps=10))
    simulation.run(60)
    assert simulation.phase("default/b") is Phase.SUCCEEDED
    simulation.run(300)
    assert simulation.phase("default/a") is Phase.SUCCEEDED


def preempt_in(simulation: Simulation) -> None:
    simulation.submit(sample_job("a", 4), Script(steps=60))
    simulation.run(15)
    simulation.submit(sample_job("b", 3, priority="high"), Script(steps=20))
    simulation.run(40)


def test_a_start_before_the_nodes_are_empty_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(cycle: CycleState, _availability: object) -> None:
        for key, job in sorted(cycle.jobs.items()):
            if job.status.phase in (Phase.RESERVED, Phase.DRAINING):
                transitions.start(cycle, key)

    monkeypatch.setattr("flyer.engine.cycle.schedule._start_ready_jobs", hasty)
    with pytest.raises(Violation, match=r"where .* still are"):
        preempt_in(Simulation(two_zones(), settings=SchedulerSettings(), seed=1))


def test_a_second_job_across_zones_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flyer.engine.placement.availability.NodeAvailability.token_holders",
        lambda _self, _job: ([], []),
    )
    simulation = Simulation(two_zones(6), settings=SchedulerSettings(), seed=1)
    simulation.submit(sample_job("a", 7), Script())
    simulation.submit(sample_job("b", 5), Script())
    with pytest.raises(Violation, match="takes the token"):
        simulation.run(5)


def test_a_suspend_code_that_decreases_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(cycle: CycleState) -> None:
        reconcile(cycle)
        for key, job in cycle.jobs.items():
            if job.status.suspend_code is SuspendCode.MAY_SUSPEND:
                cycle.update(key, suspend_code=SuspendCode.SENT)

    monkeypatch.setattr("flyer.engine.engine.reconcile", forgetful)
    with pytest.raises(Violation, match="suspendCode"):
        preempt_in(Simulation(two_zones(), settings=SchedulerSettings(), seed=1))


def test_a_status_that_is_not_committed_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyer.engine.engine.collect_commits", lambda *_args, **_keys: [])
    with pytest.raises(Violation, match="not stored"):
        preempt_in(Simulation(two_zones(), settings=SchedulerSettings(), seed=1))

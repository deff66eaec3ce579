"""Whole stories in the simulator, and proof that it would notice a broken engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api import Phase, SuspendCode
from flyer.engine import Policy, Start, transitions
from flyer.engine.settle import settle
from flyer.sim import Manner, Script, Violation, World, sample_job, two_zones

if TYPE_CHECKING:
    from flyer.engine.draft import Draft


def starts(world: World, key: str) -> list[Start]:
    return [
        action
        for _, _, actions in world.history
        for action in actions
        if isinstance(action, Start) and action.job == key
    ]


def test_preempted_then_a_node_dies_and_no_bit_changes() -> None:
    """The story of the demo: every attempt has the same split over zones."""
    world = World(two_zones(), policy=Policy(), seed=1)
    world.submit(sample_job("a", 4), Script(steps=60))
    world.run(15)
    world.submit(sample_job("b", 3, priority="high"), Script(steps=20))
    world.run(40)
    world.lose_node("a1")
    world.run(200)
    assert world.phase("default/a") is Phase.SUCCEEDED
    assert world.phase("default/b") is Phase.SUCCEEDED
    attempts = starts(world, "default/a")
    assert [one.assignment.split for one in attempts] == [(2, 2)] * 3
    assert [one.assignment.same_split for one in attempts] == [None, True, True]
    assert attempts[2].assignment.names == ("a0", "a2", "b0", "b1")
    assert world.invariants.lost_steps == 0


def test_twenty_kills_lose_less_than_a_checkpoint_interval_each() -> None:
    world = World(two_zones(), policy=Policy(backoff_seconds=0.1), seed=7)
    world.submit(sample_job("a", 4), Script(steps=400, checkpoint_steps=10))
    names = sorted(world.cluster.machines)
    for kill in range(20):
        world.run(13.0)
        name = names[kill % len(names)]
        if kill % 3 == 0:
            world.crash(with_pods=True)
        elif kill % 3 == 1:
            world.kill_pod(name)
        else:
            world.lose_node(name)
            world.run(3.0)
            world.return_node(name)
    world.run(1000)
    assert world.phase("default/a") is Phase.SUCCEEDED
    splits = {one.assignment.split for one in starts(world, "default/a")}
    assert splits == {(2, 2)}


@pytest.mark.parametrize("manner", list(Manner))
def test_every_manner_of_leaving_makes_room(manner: Manner) -> None:
    world = World(two_zones(), policy=Policy(), seed=5)
    world.submit(sample_job("a", 6), Script(steps=100, manner=manner))
    world.run(15)
    world.submit(sample_job("b", 6, priority="high"), Script(steps=10))
    world.run(60)
    assert world.phase("default/b") is Phase.SUCCEEDED
    world.run(300)
    assert world.phase("default/a") is Phase.SUCCEEDED


def preempt_in(world: World) -> None:
    world.submit(sample_job("a", 4), Script(steps=60))
    world.run(15)
    world.submit(sample_job("b", 3, priority="high"), Script(steps=20))
    world.run(40)


def test_a_start_before_the_nodes_are_empty_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(draft: Draft, _market: object) -> None:
        for key, job in sorted(draft.jobs.items()):
            if job.status.phase in (Phase.RESERVED, Phase.DRAINING):
                transitions.start(draft, key)

    monkeypatch.setattr("flyer.engine.schedule._launch", hasty)
    with pytest.raises(Violation, match=r"where .* still are"):
        preempt_in(World(two_zones(), policy=Policy(), seed=1))


def test_a_second_job_across_zones_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyer.engine.market.Market.token_holders", lambda _self, _job: ([], []))
    world = World(two_zones(6), policy=Policy(), seed=1)
    world.submit(sample_job("a", 7), Script())
    world.submit(sample_job("b", 5), Script())
    with pytest.raises(Violation, match="takes the token"):
        world.run(5)


def test_a_suspend_code_that_shrinks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(draft: Draft) -> None:
        settle(draft)
        for key, job in draft.jobs.items():
            if job.status.suspend_code is SuspendCode.MAY_SUSPEND:
                draft.update(key, suspend_code=SuspendCode.SENT)

    monkeypatch.setattr("flyer.engine.engine.settle", forgetful)
    with pytest.raises(Violation, match="suspendCode"):
        preempt_in(World(two_zones(), policy=Policy(), seed=1))


def test_a_status_that_is_not_committed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyer.engine.engine._commits", lambda *_args, **_keys: [])
    with pytest.raises(Violation, match="not stored"):
        preempt_in(World(two_zones(), policy=Policy(), seed=1))

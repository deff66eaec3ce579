"""Choice of the victims of a preemption by what each of them loses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import Phase
from flyer.engine import (
    CheckpointReported,
    Node,
    NodeEmptied,
    NodeObserved,
    PodExited,
    Released,
    RequeueRequested,
    StartRefused,
    StopRequested,
    Succeeded,
)

from .running_jobs import UNLIMITED, leave, nodes, phases

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_small_victim_is_cheaper_than_hundreds_of_idle_nodes(new_harness: Callable) -> None:
    harness = new_harness(nodes(501))
    harness.run("huge", 500, priority="low", **UNLIMITED)
    harness.run("tiny", 1, priority="low", **UNLIMITED)
    harness.wait(12 * 3600)
    harness.step(CheckpointReported("default/huge", 1, 1000, "/c"))
    harness.submit("need1", 1)
    assert phases(harness, "huge", "tiny") == [Phase.RUNNING, Phase.SUSPENDING]


def often_and_dear(new_harness: Callable, **settings: Any) -> Any:
    """Two jobs of low priority have both nodes, for an hour."""
    harness = new_harness(nodes(2), **settings)
    harness.run("often", 1, priority="low", **UNLIMITED)
    harness.run("dear", 1, priority="low", **UNLIMITED)
    harness.wait(3600)
    return harness


def save(harness: Any) -> None:
    """The job "often" has just saved, and so loses less than "dear"."""
    for name, pause_seconds in (("dear", 800), ("often", 0)):
        attempt = harness.status(name).history.attempt
        harness.step(CheckpointReported(f"default/{name}", attempt, int(harness.now), "/c"))
        harness.wait(pause_seconds)


def interrupt(harness: Any, name: str, user: str = "other") -> None:
    """An urgent job of this user is submitted, runs on one node and ends."""
    save(harness)
    harness.submit(name, 1, priority="high", user=user)
    leave(harness)
    (node,) = harness.names(name)
    harness.step(
        PodExited(f"default/{name}", 1, node, Succeeded()), NodeEmptied(node, f"default/{name}", 1)
    )
    leave(harness)
    harness.wait(3600)


def test_a_job_that_was_preempted_often_is_spared_if_others_suffice(new_harness: Callable) -> None:
    harness = often_and_dear(new_harness)
    for index in range(3):
        interrupt(harness, f"urgent{index}")
        assert [past_attempt.reason for past_attempt in harness.status("often").past_attempts] == [
            "Preempted"
        ] * (index + 1)
    save(harness)  # it would lose the least a fourth time, too
    harness.submit("urgent", 1, priority="high")
    assert phases(harness, "often", "dear") == [Phase.RUNNING, Phase.SUSPENDING]
    # The budget does not protect the job if no other job can be preempted.
    harness.submit("also", 1, priority="high")
    assert phases(harness, "often") == [Phase.SUSPENDING]


@pytest.mark.parametrize("restarts", [0, 6])
def test_preemptions_are_remembered_over_restarts_and_a_new_leader(
    new_harness: Callable, restarts: int
) -> None:
    harness = often_and_dear(new_harness)
    for index in range(3):
        interrupt(harness, f"urgent{index}")
        for _ in range(restarts):  # more than the history of attempts keeps
            harness.step(
                RequeueRequested("default/often", harness.status("often").history.attempt, "me")
            )
            leave(harness)
    harness.restart()
    leave(harness)
    save(harness)
    harness.submit("urgent", 1, priority="high")
    assert phases(harness, "often", "dear") == [Phase.RUNNING, Phase.SUSPENDING]


def test_the_times_of_preemptions_that_a_status_keeps_are_bounded(new_harness: Callable) -> None:
    harness = often_and_dear(new_harness, preemptions_max=10**6)
    times = []
    for index in range(10):
        interrupt(harness, f"urgent{index}")
        times.append(harness.status("often").history.preempted_at[-1])
    assert harness.status("often").history.preempted_at == tuple(times[-8:])
    harness.wait(86_400)
    interrupt(harness, "urgent")
    assert len(harness.status("often").history.preempted_at) == 1


def test_the_end_of_a_time_slice_is_not_a_preemption(new_harness: Callable) -> None:
    harness = new_harness(nodes(1), time_slice_seconds=3600.0)
    for name in ("often", "other"):
        harness.submit(name, 1, priority="low", **UNLIMITED)
    for turn in range(8):  # each is preempted by the other four times
        leave(harness)
        running = ("often", "other")[turn % 2]
        assert harness.status(running).phase is Phase.RUNNING
        attempt = harness.status(running).history.attempt
        harness.step(CheckpointReported(f"default/{running}", attempt, turn, "/c"))
        harness.wait(3600)
    leave(harness)
    harness.step(StopRequested("default/other", "me"))
    assert [past_attempt.reason for past_attempt in harness.status("often").past_attempts] == [
        "Preempted"
    ] * 4
    harness.step(NodeObserved(Node("d001", "A")))
    harness.run("dear", 1, priority="low", **UNLIMITED)
    save(harness)
    harness.submit("urgent", 1, priority="high")
    assert phases(harness, "often", "dear") == [Phase.SUSPENDING, Phase.RUNNING]


def test_preemptions_by_the_same_user_do_not_count(new_harness: Callable) -> None:
    harness = new_harness(nodes(2))
    harness.run("often", 1, priority="low", user="me", **UNLIMITED)
    harness.run("dear", 1, priority="low", **UNLIMITED)
    harness.wait(3600)
    for index in range(3):
        interrupt(harness, f"urgent{index}", user="me")
        assert len(harness.status("often").past_attempts) == index + 1
    save(harness)
    harness.submit("urgent", 1, priority="high", user="other")
    assert phases(harness, "often", "dear") == [Phase.SUSPENDING, Phase.RUNNING]


def test_a_spared_job_that_has_only_reserved_nodes_loses_no_work(new_harness: Callable) -> None:
    harness = new_harness(nodes(3), preemptions_max=1)
    harness.run("often", 1, **UNLIMITED)
    harness.run("dear", 1, **UNLIMITED)
    harness.run("weak", 1, priority="low", **UNLIMITED)
    harness.step(*(CheckpointReported(f"default/{name}", 1, 1, "/c") for name in ("dear", "weak")))
    harness.wait(800)
    harness.step(CheckpointReported("default/often", 1, 1, "/c"))
    harness.submit("urgent", 1, priority="high", user="other")
    harness.step(Released("default/often", 1))
    harness.empty("often")
    harness.wait(1)  # it takes the weaker one's node, and waits for it to be left
    assert phases(harness, "often", "weak") == [Phase.DRAINING, Phase.SUSPENDING]
    harness.submit("also", 1, priority="high")
    assert phases(harness, "often", "dear", "also") == [Phase.QUEUED, Phase.RUNNING, Phase.DRAINING]


def test_no_job_is_rotated_for_an_equal_one_whose_pods_are_refused(new_harness: Callable) -> None:
    harness = new_harness(nodes(1))
    harness.submit("refused", 1, **UNLIMITED)
    harness.step(StartRefused("default/refused", 1, "a quota is full"))
    harness.run("other", 1, **UNLIMITED)
    harness.empty("refused")
    leave(harness)
    for _ in range(10):
        harness.wait(3600)  # its pause and the time slice of the other job have ended
        harness.step(CheckpointReported("default/other", 1, int(harness.now), "/c"))
    assert phases(harness, "refused", "other") == [Phase.QUEUED, Phase.RUNNING]
    harness.submit("third", 1, **UNLIMITED)
    assert phases(harness, "other") == [Phase.SUSPENDING]


def test_preemptions_expire_after_a_day(new_harness: Callable) -> None:
    harness = often_and_dear(new_harness, preemptions_max=1, preemptions_seconds=7200.0)
    interrupt(harness, "urgent0")
    harness.wait(3601)
    save(harness)
    harness.submit("urgent", 1, priority="high")
    assert phases(harness, "often", "dear") == [Phase.SUSPENDING, Phase.RUNNING]


def test_nodes_that_are_not_needed_count_although_little_work_is_lost(
    new_harness: Callable,
) -> None:
    harness = new_harness(nodes(11))
    harness.run("ten", 10, priority="low", **UNLIMITED)
    harness.run("one", 1, priority="low", **UNLIMITED)
    harness.step(CheckpointReported("default/one", 1, 1, "/c"))
    harness.wait(600)
    harness.step(CheckpointReported("default/ten", 1, 1, "/c"))
    assert (
        harness.state.settings.restart_cost_seconds * 10
        < 600 + harness.state.settings.restart_cost_seconds
    )
    harness.submit("need1", 1)
    assert phases(harness, "ten", "one") == [Phase.RUNNING, Phase.SUSPENDING]


@pytest.mark.parametrize("hours", [1, 12, 500])
def test_a_job_without_checkpoints_is_not_preempted_last(new_harness: Callable, hours: int) -> None:
    harness = new_harness(nodes(2))
    harness.run("honest", 1, priority="low", **UNLIMITED)
    harness.run(
        "silent", 1, priority="low", checkpoint={"path": "/c", "interval": "87000h"}, **UNLIMITED
    )
    harness.wait(hours * 3600 + 3600)
    harness.step(CheckpointReported("default/honest", 1, 1, "/c"))
    harness.wait(240)
    harness.submit("need1", 1)
    assert phases(harness, "honest", "silent") == [Phase.RUNNING, Phase.SUSPENDING]

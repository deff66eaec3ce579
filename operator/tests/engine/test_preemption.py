"""Preemption: the choice of victims, and no start before they have released their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api import Phase, SuspendCode
from flyer.engine import (
    CheckpointReported,
    Commit,
    HoldToken,
    NodeEmptied,
    NodeLost,
    PodExited,
    ProgressReported,
    Released,
    ReleaseToken,
    ResumeRequested,
    Signal,
    Start,
    Stop,
    StopRequested,
    Succeeded,
    SuspendReceived,
    SuspendRequested,
)
from flyer.sim import sample_job, two_zones

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_order_is_commit_signal_release_empty_start(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 4)
    harness.wait(10)
    actions = harness.submit("b", 3, priority="high")
    assert [(commit.job, commit.status.phase) for commit in pick(actions, Commit)] == [
        ("default/a", Phase.SUSPENDING),  # the release is stored before the assignment
        ("default/b", Phase.DRAINING),
    ]
    (signal,) = pick(actions, Signal)
    assert (signal.job, signal.deadline, signal.reason) == (
        "default/a",
        harness.now + 10,
        "Preempted",
    )
    assert not pick(actions, Start, Stop)

    actions = harness.step(SuspendReceived("default/a", 1))
    assert harness.status("a").suspend_code is SuspendCode.RECEIVED
    harness.step(CheckpointReported("default/a", 1, 9, "/ckpt/9"))
    actions = harness.step(Released("default/a", 1))
    (stop,) = pick(actions, Stop)
    assert (stop.nodes, stop.kill) == (("a0", "a1", "b0", "b1"), True)
    assert not pick(actions, Start)

    actions = harness.step(NodeEmptied("a0", "default/a", 1))
    assert not pick(actions, Start)
    actions = harness.step(NodeEmptied("a1", "default/a", 1))  # b does not need b0 and b1
    (start,) = pick(actions, Start)
    assert (start.job, start.assignment.names) == ("default/b", ("a0", "a1", "a2"))
    assert harness.status("a").phase is Phase.SUSPENDING

    harness.step(NodeEmptied("b0", "default/a", 1), NodeEmptied("b1", "default/a", 1))
    status = harness.status("a")
    assert status.phase is Phase.QUEUED
    assert status.eviction is not None
    assert (status.eviction.reason, status.eviction.by) == ("Preempted", "default/b")
    assert status.eviction.lost_steps in (None, 0)


def test_the_victim_resumes_on_the_same_zone_layout(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.run("a", 4)
    harness.step(CheckpointReported("default/a", 1, 5, "/ckpt/5"))
    harness.wait(10)
    harness.submit("b", 2, priority="high", crossZone="Never")
    harness.step(Released("default/a", 1))
    harness.empty("a")
    harness.up("b")
    # Four nodes are free, three of them in B: another zone layout, so it waits until the timeout.
    pending = harness.status("a").pending
    assert pending is not None
    assert pending.reason == "WaitingForZoneLayout"
    assert "2+2" in pending.message
    harness.step(StopRequested("default/b", kill=True))
    actions = harness.empty("b")
    (start,) = [action for action in pick(actions, Start) if action.job == "default/a"]
    assert start.assignment.names == ("a0", "a1", "b0", "b1")
    assert start.assignment.same_zone_layout is True
    assert start.restore_from.step == 5


def test_after_the_zone_layout_timeout_the_victim_resumes_on_another_distribution(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness(same_zone_layout_seconds=30.0)
    harness.run("a", 4)
    harness.step(CheckpointReported("default/a", 1, 5, "/ckpt/5"))
    harness.wait(10)
    harness.submit("b", 2, priority="high", crossZone="Never")
    harness.step(Released("default/a", 1))
    harness.empty("a")
    assert not pick(harness.wait(29), Start)
    (start,) = pick(harness.wait(1), Start)
    assert start.assignment.zone_layout == (1, 3)
    assert start.assignment.same_zone_layout is False


@pytest.mark.parametrize(
    ("first", "second", "preempts"),
    [
        ("normal", "high", True),
        ("low", "normal", True),
        ("auto", "above-normal", True),  # without quotas, auto is normal
        ("auto", "normal", False),
        ("normal", "normal", False),
        ("high", "normal", False),
    ],
)
def test_only_a_strictly_lower_priority_is_preempted(
    new_harness: Callable, first: str, second: str, preempts: bool
) -> None:
    harness = new_harness()
    harness.run("a", 6, priority=first)
    harness.wait(100)
    harness.submit("b", 1, priority=second)
    assert (harness.status("a").phase is Phase.SUSPENDING) == preempts


def test_no_job_is_preempted_within_the_minimum_runtime(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 6)
    actions = harness.submit("b", 1, priority="high")
    assert harness.status("a").phase is Phase.RUNNING
    assert actions[-1].time == harness.now + 5  # the end of the minimum runtime
    harness.wait(5)
    assert harness.status("a").phase is Phase.SUSPENDING


def test_no_job_is_preempted_for_a_job_within_the_preemption_delay(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness(preemption_delay_seconds=0.5)
    harness.run("a", 6)
    harness.wait(10)
    actions = harness.submit("b", 3, priority="high")
    assert harness.status("a").phase is Phase.RUNNING
    assert not pick(actions, Signal)
    assert actions[-1].time == harness.now + 0.5
    harness.wait(0.5)
    assert (harness.status("a").phase, harness.status("b").phase) == (
        Phase.SUSPENDING,
        Phase.DRAINING,
    )


@pytest.mark.parametrize("ends", ["cancelled", "nodes are free", "suspended"])
def test_a_preemption_that_is_no_longer_needed_is_cancelled(
    new_harness: Callable, ends: str
) -> None:
    harness = new_harness(preemption_delay_seconds=0.5)
    harness.run("a", 3, nodeClass="default", zone="A", priority="low")
    harness.run("other", 3, nodeClass="default", zone="B", priority="extreme-high")
    harness.wait(10)
    harness.submit("b", 3, priority="high")
    harness.now += 0.2
    if ends == "cancelled":
        harness.step(StopRequested("default/b"))
    elif ends == "suspended":
        harness.step(SuspendRequested("default/b"))
    else:
        harness.step(
            *(PodExited("default/other", 1, name, Succeeded()) for name in harness.names("other")),
            *(NodeEmptied(name, "default/other", 1) for name in harness.names("other")),
        )
        assert harness.status("b").phase is Phase.STARTING
    for _ in range(5):
        harness.wait(1)
    assert harness.status("a").phase is Phase.RUNNING
    assert harness.status("a").history.attempt == 1


def test_jobs_that_arrive_together_wait_for_one_preemption_delay(new_harness: Callable) -> None:
    harness = new_harness(preemption_delay_seconds=0.5)
    for name in ("x", "y", "z"):
        harness.run(name, 2, priority="low", crossZone="LastResort")
    harness.wait(10)
    for name in ("a", "b", "c"):
        harness.submit(name, 2, priority="high")
    harness.wait(0.5)
    assert {harness.status(name).phase for name in ("x", "y", "z")} == {Phase.SUSPENDING}
    assert {harness.status(name).phase for name in ("a", "b", "c")} == {Phase.DRAINING}


def test_a_job_without_a_stored_status_keeps_its_queue_position_and_time_at_each_rebuild(
    new_harness: Callable,
) -> None:
    harness = new_harness(nodes=two_zones(1)[:1], preemption_delay_seconds=0.5)
    harness.run("low", 1, priority="low")
    harness.wait(10)
    # The status of the first job is only an explanation and was deferred: it is not stored.
    for name, created_at in (("zz-first", harness.now - 2), ("aa-second", harness.now - 1)):
        job = sample_job(name, 1, priority="high")
        metadata = job.metadata.replace(creation_timestamp=created_at)
        harness.jobs[job.key] = job.replace(metadata=metadata)
    for _ in range(4):  # as with quarantined jobs that are retried repeatedly
        harness.restart()
        harness.wait(0.3)
    assert harness.status("low").phase is Phase.SUSPENDING
    assert harness.names("zz-first")
    created_at = harness.jobs["default/zz-first"].metadata.creation_timestamp
    assert harness.status("zz-first").history.queued_at == created_at


def test_no_job_is_preempted_for_the_zone_layout_while_other_nodes_are_free(
    new_harness: Callable,
) -> None:
    harness = new_harness(same_zone_layout_seconds=60.0)
    harness.run("a", 4)
    assert harness.status("a").zones == "A+B"
    harness.step(CheckpointReported("default/a", 1, 5, "/ckpt/5"), SuspendRequested("default/a"))
    harness.step(Released("default/a", 1))
    harness.empty("a")
    harness.run("low", 2, nodeClass="default", zone="A", priority="low")
    harness.wait(10)
    harness.step(ResumeRequested("default/a"))  # one node of A and three of B are free
    harness.wait(1)
    assert (harness.status("a").phase, harness.status("low").phase) == (Phase.QUEUED, Phase.RUNNING)
    harness.wait(60)
    assert (harness.status("a").phase, harness.status("low").phase) == (
        Phase.STARTING,
        Phase.RUNNING,
    )


def test_the_victim_is_the_job_that_loses_least_work(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 3, nodeClass="default", zone="A")
    harness.run("b", 3, nodeClass="default", zone="B")
    harness.wait(1000)
    harness.step(CheckpointReported("default/a", 1, 500, "/ckpt/500"))
    harness.submit("c", 2, priority="high")
    assert harness.status("a").phase is Phase.SUSPENDING  # it has a new checkpoint
    assert harness.status("b").phase is Phase.RUNNING


def test_several_small_victims_lose_less_than_a_large_one(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("large", 3, nodeClass="default", zone="A")
    for name in ("x", "y", "z"):
        harness.run(name, 1, nodeClass="default", zone="B")
    harness.wait(100)
    harness.submit("c", 2, priority="high")
    phases = {name: harness.status(name).phase for name in ("large", "x", "y", "z")}
    assert list(phases.values()).count(Phase.SUSPENDING) == 2
    assert phases["large"] is Phase.RUNNING


def test_only_a_higher_priority_takes_over_a_reservation(
    new_harness: Callable,
) -> None:
    harness = new_harness()
    harness.run("a", 6)
    harness.wait(10)
    harness.submit("b", 6, priority="high")
    assert harness.status("b").phase is Phase.DRAINING
    harness.submit("equal", 6, priority="high")
    assert harness.status("b").phase is Phase.DRAINING
    harness.submit("c", 6, priority="extreme-high")
    assert (harness.status("b").phase, harness.status("c").phase) == (Phase.QUEUED, Phase.DRAINING)
    harness.step(Released("default/a", 1))
    harness.empty("a")
    assert harness.status("c").phase is Phase.STARTING
    assert harness.status("b").history.restarts_without_progress == 0


def test_a_job_that_is_starting_is_preempted_immediately(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.submit("typo", 6, priority="low", preemption={"minRuntime": "2h"})
    assert harness.status("typo").phase is Phase.STARTING
    actions = harness.submit("vip", 6, priority="extreme-high")
    (stop,) = pick(actions, Stop)
    assert (stop.job, stop.kill) == ("default/typo", True)
    harness.empty("typo")
    assert harness.status("vip").phase is Phase.STARTING
    assert harness.status("typo").phase is Phase.QUEUED


def test_progress_extends_the_grace_period_up_to_its_limit(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 6)
    harness.wait(10)
    harness.submit("b", 1, priority="high")
    harness.step(SuspendReceived("default/a", 1))
    started, deadlines = harness.now, []
    for _ in range(8):
        harness.now += 9
        signals = pick(harness.step(ProgressReported("default/a", 1, 1)), Signal)
        deadlines += [signal.deadline - started for signal in signals]
    assert deadlines[0] == 19
    assert max(deadlines) == 60  # maxCheckpointGracePeriod
    assert harness.status("a").suspension is not None
    assert harness.status("a").suspension.expired


def test_a_job_that_does_not_respond_is_killed_at_the_deadline(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 6)
    harness.wait(10)
    harness.submit("b", 1, priority="high")
    harness.now += 9.9
    # Progress without an acknowledgement of the suspension.
    assert not pick(harness.step(ProgressReported("default/a", 1, 1)), Stop)
    (stop,) = pick(harness.wait(0.1), Stop)
    assert stop.kill
    harness.empty("a")
    assert harness.status("a").phase is Phase.QUEUED
    assert harness.status("b").phase is Phase.STARTING


def test_a_reservation_is_moved_from_a_node_that_does_not_empty(new_harness: Callable) -> None:
    harness = new_harness(stop_deadline_seconds=30.0)
    harness.run("a", 1, nodeClass="default", zone="A")
    harness.run("other", 2, nodeClass="default", zone="A")
    harness.wait(10)
    harness.submit("b", 1, priority="high", nodeClass="default", zone="A")
    assert harness.names("b") == harness.names("a")
    stuck, other_nodes = harness.names("a"), harness.names("other")
    harness.wait(10)  # the grace period of a ends: it is killed
    harness.wait(29)
    assert harness.names("b") == stuck
    harness.wait(1)  # its node does not become empty
    assert harness.names("b")[0] in other_nodes
    assert harness.status("other").phase is Phase.SUSPENDING
    assert harness.names("a") != stuck


def test_one_job_crosses_zones_at_a_time(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness(two_zones(5))
    harness.submit("a", 6)
    actions = harness.submit("b", 4, crossZone="LastResort")
    assert harness.status("a").zones == "A+B"
    assert harness.status("b").phase is Phase.QUEUED
    pending = harness.status("b").pending
    assert pending is not None
    assert pending.reason == "WaitingForCrossZoneToken"
    assert pending.blocked_by == ("default/a",)
    assert not pick(actions, HoldToken)
    harness.up("a")
    harness.step(StopRequested("default/a", kill=True))
    assert harness.status("b").phase is Phase.DRAINING  # in one zone, so it needs no token
    actions = harness.empty("a")
    assert pick(actions, ReleaseToken) == [ReleaseToken("default/a")]
    assert harness.status("b").zones == "A"


def test_the_token_moves_once_its_holder_has_released_its_nodes(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 4)
    harness.wait(10)
    harness.submit("b", 4, priority="high")
    harness.step(Released("default/a", 1))
    actions = harness.step(*(NodeEmptied(n, "default/a", 1) for n in ("a0", "a1", "b0", "b1")))
    kinds = [
        type(action) for action in actions if isinstance(action, HoldToken | ReleaseToken | Start)
    ]
    assert kinds == [ReleaseToken, HoldToken, Start]


def test_a_suspending_victim_keeps_its_queue_position(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness(two_zones(4))
    harness.run("a", 4, nodeClass="default", zone="A")
    harness.run("x", 3, nodeClass="default", zone="B")
    harness.wait(10)
    harness.submit("b", 1, priority="high", nodeClass="default", zone="A")
    # One node of B and three of A will be free: those of A are for a, which was submitted before c.
    harness.submit("c", 3, nodeClass="default", zone="A")
    harness.step(Released("default/a", 1))
    harness.empty("a")
    assert harness.status("a").phase is Phase.QUEUED
    # The end of b is unknown: c is backfilled, and releases the nodes when b ends.
    harness.up("b")
    harness.up("c")
    assert harness.status("c").assignment.backfill
    harness.wait(10)
    harness.step(PodExited("default/b", 1, harness.names("b")[0], Succeeded()))
    harness.empty("b")
    assert (harness.status("a").phase, harness.status("c").phase) == (
        Phase.DRAINING,
        Phase.SUSPENDING,
    )


def test_a_reservation_with_a_lost_node_is_replaced(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 3, nodeClass="default", zone="A")
    harness.wait(10)
    harness.submit("b", 2, priority="high", nodeClass="default", zone="A")
    before = harness.names("b")
    harness.step(NodeLost(before[0], "PowerLost"))
    assert before[0] not in harness.names("b")
    assert len(harness.names("b")) == 2
    assert harness.status("b").history.attempt == 2

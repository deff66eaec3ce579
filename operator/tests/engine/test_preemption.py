"""Who gives way to whom, and that nothing starts before they have left."""

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


def test_the_order_is_commit_signal_release_empty_start(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 4)
    d.wait(10)
    actions = d.submit("b", 3, priority="high")
    assert [(one.job, one.status.phase) for one in pick(actions, Commit)] == [
        ("default/a", Phase.SUSPENDING),  # given back in the store before it is given out
        ("default/b", Phase.DRAINING),
    ]
    (signal,) = pick(actions, Signal)
    assert (signal.job, signal.deadline, signal.reason) == ("default/a", d.now + 10, "Preempted")
    assert not pick(actions, Start, Stop)

    actions = d.tell(SuspendReceived("default/a", 1))
    assert d.status("a").suspend_code is SuspendCode.RECEIVED
    d.tell(CheckpointReported("default/a", 1, 9, "/ckpt/9"))
    actions = d.tell(Released("default/a", 1))
    (stop,) = pick(actions, Stop)
    assert (stop.nodes, stop.kill) == (("a0", "a1", "b0", "b1"), True)
    assert not pick(actions, Start)

    actions = d.tell(NodeEmptied("a0", "default/a", 1))
    assert not pick(actions, Start)
    actions = d.tell(NodeEmptied("a1", "default/a", 1))  # b0 and b1 are not b's business
    (start,) = pick(actions, Start)
    assert (start.job, start.assignment.names) == ("default/b", ("a0", "a1", "a2"))
    assert d.status("a").phase is Phase.SUSPENDING

    d.tell(NodeEmptied("b0", "default/a", 1), NodeEmptied("b1", "default/a", 1))
    status = d.status("a")
    assert status.phase is Phase.QUEUED
    assert status.eviction is not None
    assert (status.eviction.reason, status.eviction.by) == ("Preempted", "default/b")
    assert status.eviction.lost_steps in (None, 0)


def test_the_victim_resumes_on_the_same_zone_layout(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 4)
    d.tell(CheckpointReported("default/a", 1, 5, "/ckpt/5"))
    d.wait(10)
    d.submit("b", 2, priority="high", crossZone="Never")
    d.tell(Released("default/a", 1))
    d.empty("a")
    d.up("b")
    # Four nodes are free, three of them in B: not as before, so it waits for a while.
    pending = d.status("a").pending
    assert pending is not None
    assert pending.reason == "WaitingForZoneLayout"
    assert "2+2" in pending.message
    d.tell(StopRequested("default/b", kill=True))
    actions = d.empty("b")
    (start,) = [one for one in pick(actions, Start) if one.job == "default/a"]
    assert start.assignment.names == ("a0", "a1", "b0", "b1")
    assert start.assignment.same_zone_layout is True
    assert start.restore_from.step == 5


def test_after_its_patience_the_victim_takes_another_split(desk: Callable, pick: Callable) -> None:
    d = desk(same_zone_layout_seconds=30.0)
    d.run("a", 4)
    d.tell(CheckpointReported("default/a", 1, 5, "/ckpt/5"))
    d.wait(10)
    d.submit("b", 2, priority="high", crossZone="Never")
    d.tell(Released("default/a", 1))
    d.empty("a")
    assert not pick(d.wait(29), Start)
    (start,) = pick(d.wait(1), Start)
    assert start.assignment.split == (1, 3)
    assert start.assignment.same_zone_layout is False


@pytest.mark.parametrize(
    ("first", "second", "preempts"),
    [
        ("normal", "high", True),
        ("low", "normal", True),
        ("auto", "above-normal", True),  # auto is normal while no quota says otherwise
        ("auto", "normal", False),
        ("normal", "normal", False),
        ("high", "normal", False),
    ],
)
def test_only_a_strictly_lower_priority_gives_way(
    desk: Callable, first: str, second: str, preempts: bool
) -> None:
    d = desk()
    d.run("a", 6, priority=first)
    d.wait(100)
    d.submit("b", 1, priority=second)
    assert (d.status("a").phase is Phase.SUSPENDING) == preempts


def test_nobody_is_preempted_within_the_minimum_runtime(desk: Callable) -> None:
    d = desk()
    d.run("a", 6)
    actions = d.submit("b", 1, priority="high")
    assert d.status("a").phase is Phase.RUNNING
    assert actions[-1].time == d.now + 5  # it wakes when the minimum is over
    d.wait(5)
    assert d.status("a").phase is Phase.SUSPENDING


def test_no_job_is_interrupted_for_one_that_has_just_arrived(
    desk: Callable, pick: Callable
) -> None:
    d = desk(preemption_delay_seconds=0.5)
    d.run("a", 6)
    d.wait(10)
    actions = d.submit("b", 3, priority="high")
    assert d.status("a").phase is Phase.RUNNING
    assert not pick(actions, Signal)
    assert actions[-1].time == d.now + 0.5
    d.wait(0.5)
    assert (d.status("a").phase, d.status("b").phase) == (Phase.SUSPENDING, Phase.DRAINING)


@pytest.mark.parametrize("ends", ["cancelled", "nodes are free", "suspended"])
def test_a_preemption_that_is_not_needed_any_more_is_called_off(desk: Callable, ends: str) -> None:
    d = desk(preemption_delay_seconds=0.5)
    d.run("a", 3, nodeClass="default", zone="A", priority="low")
    d.run("other", 3, nodeClass="default", zone="B", priority="extreme-high")
    d.wait(10)
    d.submit("b", 3, priority="high")
    d.now += 0.2
    if ends == "cancelled":
        d.tell(StopRequested("default/b"))
    elif ends == "suspended":
        d.tell(SuspendRequested("default/b"))
    else:
        d.tell(
            *(PodExited("default/other", 1, name, Succeeded()) for name in d.names("other")),
            *(NodeEmptied(name, "default/other", 1) for name in d.names("other")),
        )
        assert d.status("b").phase is Phase.STARTING
    for _ in range(5):
        d.wait(1)
    assert d.status("a").phase is Phase.RUNNING
    assert d.status("a").history.attempt == 1


def test_several_that_arrive_together_wait_for_one_delay(desk: Callable) -> None:
    d = desk(preemption_delay_seconds=0.5)
    for name in ("x", "y", "z"):
        d.run(name, 2, priority="low", crossZone="LastResort")
    d.wait(10)
    for name in ("a", "b", "c"):
        d.submit(name, 2, priority="high")
    d.wait(0.5)
    assert {d.status(name).phase for name in ("x", "y", "z")} == {Phase.SUSPENDING}
    assert {d.status(name).phase for name in ("a", "b", "c")} == {Phase.DRAINING}


def test_a_job_without_a_stored_status_keeps_its_place_and_its_time_at_each_rebuild(
    desk: Callable,
) -> None:
    d = desk(nodes=two_zones(1)[:1], preemption_delay_seconds=0.5)
    d.run("low", 1, priority="low")
    d.wait(10)
    # The status of the first one only explains, and was put aside: it is not in the store.
    for name, created_at in (("zz-first", d.now - 2), ("aa-second", d.now - 1)):
        job = sample_job(name, 1, priority="high")
        metadata = job.metadata.replace(creation_timestamp=created_at)
        d.jobs[job.key] = job.replace(metadata=metadata)
    for _ in range(4):  # as with jobs in quarantine that are tried again and again
        d.restart()
        d.wait(0.3)
    assert d.status("low").phase is Phase.SUSPENDING
    assert d.names("zz-first")
    created_at = d.jobs["default/zz-first"].metadata.creation_timestamp
    assert d.status("zz-first").history.queued_at == created_at


def test_nobody_is_preempted_for_the_split_while_other_nodes_are_free(desk: Callable) -> None:
    d = desk(same_zone_layout_seconds=60.0)
    d.run("a", 4)
    assert d.status("a").zones == "A+B"
    d.tell(CheckpointReported("default/a", 1, 5, "/ckpt/5"), SuspendRequested("default/a"))
    d.tell(Released("default/a", 1))
    d.empty("a")
    d.run("low", 2, nodeClass="default", zone="A", priority="low")
    d.wait(10)
    d.tell(ResumeRequested("default/a"))  # one node of A and three of B are free
    d.wait(1)
    assert (d.status("a").phase, d.status("low").phase) == (Phase.QUEUED, Phase.RUNNING)
    d.wait(60)
    assert (d.status("a").phase, d.status("low").phase) == (Phase.STARTING, Phase.RUNNING)


def test_the_victim_is_who_loses_least_work(desk: Callable) -> None:
    d = desk()
    d.run("a", 3, nodeClass="default", zone="A")
    d.run("b", 3, nodeClass="default", zone="B")
    d.wait(1000)
    d.tell(CheckpointReported("default/a", 1, 500, "/ckpt/500"))
    d.submit("c", 2, priority="high")
    assert d.status("a").phase is Phase.SUSPENDING  # it has just saved
    assert d.status("b").phase is Phase.RUNNING


def test_several_small_victims_lose_less_than_a_large_one(desk: Callable) -> None:
    d = desk()
    d.run("large", 3, nodeClass="default", zone="A")
    for name in ("x", "y", "z"):
        d.run(name, 1, nodeClass="default", zone="B")
    d.wait(100)
    d.submit("c", 2, priority="high")
    phases = {name: d.status(name).phase for name in ("large", "x", "y", "z")}
    assert list(phases.values()).count(Phase.SUSPENDING) == 2
    assert phases["large"] is Phase.RUNNING


def test_a_reservation_is_locked_against_equals_and_given_up_to_a_higher_priority(
    desk: Callable,
) -> None:
    d = desk()
    d.run("a", 6)
    d.wait(10)
    d.submit("b", 6, priority="high")
    assert d.status("b").phase is Phase.DRAINING
    d.submit("equal", 6, priority="high")
    assert d.status("b").phase is Phase.DRAINING
    d.submit("c", 6, priority="extreme-high")
    assert (d.status("b").phase, d.status("c").phase) == (Phase.QUEUED, Phase.DRAINING)
    d.tell(Released("default/a", 1))
    d.empty("a")
    assert d.status("c").phase is Phase.STARTING
    assert d.status("b").history.restarts_without_progress == 0


def test_a_job_that_only_starts_gives_way_at_once(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.submit("typo", 6, priority="low", preemption={"minRuntime": "2h"})
    assert d.status("typo").phase is Phase.STARTING
    actions = d.submit("vip", 6, priority="extreme-high")
    (stop,) = pick(actions, Stop)
    assert (stop.job, stop.kill) == ("default/typo", True)
    d.empty("typo")
    assert d.status("vip").phase is Phase.STARTING
    assert d.status("typo").phase is Phase.QUEUED


def test_progress_extends_the_grace_up_to_its_limit(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 6)
    d.wait(10)
    d.submit("b", 1, priority="high")
    d.tell(SuspendReceived("default/a", 1))
    begun, deadlines = d.now, []
    for _ in range(8):
        d.now += 9
        signals = pick(d.tell(ProgressReported("default/a", 1, 1)), Signal)
        deadlines += [signal.deadline - begun for signal in signals]
    assert deadlines[0] == 19
    assert max(deadlines) == 60  # maxCheckpointGracePeriod
    assert d.status("a").suspension is not None
    assert d.status("a").suspension.expired


def test_silence_is_killed_at_the_deadline(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 6)
    d.wait(10)
    d.submit("b", 1, priority="high")
    d.now += 9.9
    assert not pick(d.tell(ProgressReported("default/a", 1, 1)), Stop)  # works on, unasked
    (stop,) = pick(d.wait(0.1), Stop)
    assert stop.kill
    d.empty("a")
    assert d.status("a").phase is Phase.QUEUED
    assert d.status("b").phase is Phase.STARTING


def test_a_node_that_does_not_empty_is_not_waited_for(desk: Callable) -> None:
    d = desk(stop_deadline_seconds=30.0)
    d.run("a", 1, nodeClass="default", zone="A")
    d.run("other", 2, nodeClass="default", zone="A")
    d.wait(10)
    d.submit("b", 1, priority="high", nodeClass="default", zone="A")
    assert d.names("b") == d.names("a")
    stuck, others = d.names("a"), d.names("other")
    d.wait(10)  # a's grace is over: killed
    d.wait(29)
    assert d.names("b") == stuck
    d.wait(1)  # and its node does not empty
    assert d.names("b")[0] in others
    assert d.status("other").phase is Phase.SUSPENDING
    assert d.names("a") != stuck


def test_one_job_crosses_zones_at_a_time(desk: Callable, pick: Callable) -> None:
    d = desk(two_zones(5))
    d.submit("a", 6)
    actions = d.submit("b", 4, crossZone="LastResort")
    assert d.status("a").zones == "A+B"
    assert d.status("b").phase is Phase.QUEUED
    pending = d.status("b").pending
    assert pending is not None
    assert pending.reason == "WaitingForCrossZoneToken"
    assert pending.blocked_by == ("default/a",)
    assert not pick(actions, HoldToken)
    d.up("a")
    d.tell(StopRequested("default/a", kill=True))
    assert d.status("b").phase is Phase.DRAINING  # in one zone now: it needs no token
    actions = d.empty("a")
    assert pick(actions, ReleaseToken) == [ReleaseToken("default/a")]
    assert d.status("b").zones == "A"


def test_the_token_moves_only_when_its_holder_has_left(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 4)
    d.wait(10)
    d.submit("b", 4, priority="high")
    d.tell(Released("default/a", 1))
    actions = d.tell(*(NodeEmptied(n, "default/a", 1) for n in ("a0", "a1", "b0", "b1")))
    kinds = [
        type(action) for action in actions if isinstance(action, HoldToken | ReleaseToken | Start)
    ]
    assert kinds == [ReleaseToken, HoldToken, Start]


def test_a_victim_that_is_leaving_keeps_its_place(desk: Callable, pick: Callable) -> None:
    d = desk(two_zones(4))
    d.run("a", 4, nodeClass="default", zone="A")
    d.run("x", 3, nodeClass="default", zone="B")
    d.wait(10)
    d.submit("b", 1, priority="high", nodeClass="default", zone="A")
    # One node of B and three of A will be free: those of A are a's, who asked before c.
    d.submit("c", 3, nodeClass="default", zone="A")
    d.tell(Released("default/a", 1))
    d.empty("a")
    assert d.status("a").phase is Phase.QUEUED
    # Nobody knows when b ends: c uses them meanwhile, and gives them back when it does.
    d.up("b")
    d.up("c")
    assert d.status("c").assignment.backfill
    d.wait(10)
    d.tell(PodExited("default/b", 1, d.names("b")[0], Succeeded()))
    d.empty("b")
    assert (d.status("a").phase, d.status("c").phase) == (Phase.DRAINING, Phase.SUSPENDING)


def test_a_reservation_with_a_dying_node_is_placed_anew(desk: Callable) -> None:
    d = desk()
    d.run("a", 3, nodeClass="default", zone="A")
    d.wait(10)
    d.submit("b", 2, priority="high", nodeClass="default", zone="A")
    before = d.names("b")
    d.tell(NodeLost(before[0], "PowerLost"))
    assert before[0] not in d.names("b")
    assert len(d.names("b")) == 2
    assert d.status("b").history.attempt == 2

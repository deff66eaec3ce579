"""Whose fault a failure is: the job's, a node's, or the whole cluster's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerJob, Phase
from flyer.engine import (
    CheckpointReported,
    Commit,
    Event,
    Failed,
    GangStarted,
    JobRemoved,
    JobSubmitted,
    Killed,
    Node,
    NodeEmptied,
    NodeObserved,
    NodeRemoved,
    PodExited,
    Start,
    StartFailed,
    StartPending,
    Stop,
    StreamLost,
    StreamRestored,
)
from flyer.sim import sample_job

if TYPE_CHECKING:
    from collections.abc import Callable

A = "default/a"


def one_zone(count: int) -> list[Node]:
    return [Node(f"n{index}", "A") for index in range(count)]


def broken(node: str, fault: str = "Unhealthy (Xid79)") -> NodeObserved:
    return NodeObserved(Node(node, "A", ready=False, reason=fault, fault=fault))


# -- hardware -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault_first", [True, False])
def test_a_hardware_fault_near_a_failed_rank_is_the_cause(
    desk: Callable, *, fault_first: bool
) -> None:
    d = desk(one_zone(4))
    d.run("a", 2, maxRestarts=0)
    d.tell(CheckpointReported(A, 1, 100, "/c"))
    events: list[Event] = [broken("n0"), PodExited(A, 1, "n0", Failed(1, "CUDA error"))]
    for event in events if fault_first else reversed(events):
        d.tell(event)
        d.wait(2)
    d.empty("a")
    status = d.status("a")
    assert status.eviction.reason == "HardwareFault"
    assert "n0 (Unhealthy (Xid79))" in status.eviction.message
    assert status.history.restarts_without_progress == 0
    assert status.assignment.names == ("n2", "n1")  # the node is replaced at its place


def test_a_hardware_fault_that_is_just_over_still_explains_a_failure(desk: Callable) -> None:
    d = desk(one_zone(2))
    d.run("a", 1)
    d.tell(broken("n0"))
    d.tell(NodeObserved(Node("n0", "A")))
    d.wait(60)
    d.tell(PodExited(A, 1, "n0", Failed(1, "CUDA error")))
    assert d.status("a").eviction.reason == "HardwareFault"


@pytest.mark.parametrize(
    "node",
    [
        Node("n0", "A", ready=False, reason="drained by eve: maintenance"),
        Node("n3", "A", ready=False, reason="Unhealthy (Xid79)", fault="Unhealthy (Xid79)"),
    ],
)
def test_a_drain_or_another_jobs_node_excuses_nothing(desk: Callable, node: Node) -> None:
    d = desk(one_zone(4))
    d.run("a", 1)
    d.tell(NodeObserved(node))
    d.tell(PodExited(A, 1, "n0", Failed(1, "ValueError")))
    assert d.status("a").phase is Phase.FAILED


def test_an_old_hardware_fault_excuses_nothing(desk: Callable) -> None:
    d = desk(one_zone(2))
    d.run("a", 1, progressDeadline=None)
    d.tell(broken("n0"))
    d.tell(NodeObserved(Node("n0", "A")))
    d.wait(3600)
    d.tell(PodExited(A, 1, "n0", Failed(1, "ValueError")))
    assert d.status("a").phase is Phase.FAILED


# -- the first cause ------------------------------------------------------------------------------


def test_an_abort_after_another_ranks_failure_is_a_consequence(desk: Callable) -> None:
    d = desk(one_zone(4))
    d.run("a", 2)
    d.tell(
        PodExited(A, 1, "n0", Failed(1, "ValueError: boom")),
        PodExited(A, 1, "n1", Killed(6, "SIGABRT")),
    )
    status = d.status("a")
    assert (status.phase, status.reason) == (Phase.FAILED, "RankFailed")
    assert "ValueError: boom" in status.message


@pytest.mark.parametrize(("signal", "reason"), [(11, "SIGSEGV"), (9, "OOMKilled")])
def test_a_crash_that_repeats_is_the_jobs_own(desk: Callable, signal: int, reason: str) -> None:
    d = desk(one_zone(8))
    d.run("a", 1)
    for attempt in (1, 2, 3):
        assert d.status("a").phase is Phase.RUNNING
        d.tell(PodExited(A, attempt, d.names("a")[0], Killed(signal, reason)))
        d.empty("a")
        d.wait(60)
        if d.status("a").phase is Phase.STARTING:
            d.up("a")
    status = d.status("a")
    assert (status.phase, status.reason) == (Phase.FAILED, "RankFailed")
    assert "3 attempts in a row" in status.message


def test_crashes_with_newer_checkpoints_between_them_are_no_row(desk: Callable) -> None:
    d = desk(one_zone(8))
    d.run("a", 1)
    for attempt in range(1, 7):
        d.tell(CheckpointReported(A, attempt, 10 * attempt, "/c"))
        d.tell(PodExited(A, attempt, d.names("a")[0], Killed(11)))
        d.empty("a")
        d.wait(60)
        d.up("a")
    assert d.status("a").phase is Phase.RUNNING


# -- starts ---------------------------------------------------------------------------------------


def test_a_node_on_which_pods_do_not_start_is_avoided(desk: Callable) -> None:
    d = desk(one_zone(3))
    d.submit("a", 1)
    (bad,) = d.names("a")
    d.wait(600)
    d.empty("a")
    d.wait(60)
    assert d.status("a").phase is Phase.STARTING
    assert d.names("a") != (bad,)


def test_the_node_that_a_start_waits_for_is_the_culprit(desk: Callable) -> None:
    d = desk(one_zone(5))
    d.submit("a", 2)
    d.tell(StartPending(A, 1, ("n1",)))
    d.wait(600)
    d.empty("a")
    d.wait(60)
    assert d.names("a") == ("n0", "n2")
    assert "on n1" in d.status("a").eviction.message


def test_a_culprit_is_avoided_although_its_zone_fits_tighter(desk: Callable) -> None:
    d = desk([Node("bad", "A"), Node("b0", "B"), Node("b1", "B"), Node("b2", "B")])
    d.submit("a", 1)
    assert d.names("a") == ("bad",)
    d.tell(StartFailed(A, 1, "FailedCreatePodSandBox", ("bad",)))
    d.empty("a")
    d.wait(60)
    assert d.names("a") == ("b0",)
    assert d.status("a").history.restarts_without_progress == 0


def test_lower_jobs_give_way_before_a_culprit_is_tried_again(desk: Callable) -> None:
    d = desk([Node("good", "A"), Node("then-bad", "A")])
    d.run("low", 1, priority="low")
    d.submit("a", 1, priority="high")
    assert (d.names("low"), d.names("a")) == (("good",), ("then-bad",))
    d.tell(StartFailed(A, 1, "no sandbox", ("then-bad",)))
    d.empty("a")
    d.wait(60)
    assert d.names("a") == ("good",)
    assert d.status("low").phase is Phase.SUSPENDING


def test_a_node_that_failed_two_jobs_is_avoided_by_a_third(desk: Callable) -> None:
    d = desk(one_zone(3))
    for name in ("a", "b"):
        d.submit(name, 1)
        d.tell(StartFailed(f"default/{name}", 1, "no sandbox", ("n0",)))
        d.empty(name)
    d.wait(1)
    d.submit("c", 1)
    assert d.names("c") != ("n0",)


def test_one_users_failing_starts_make_no_other_avoid_the_node(desk: Callable) -> None:
    """Else a user whose registry does not answer has others interrupt jobs beside idle nodes."""
    d = desk(one_zone(2))
    d.run("low", 1, user="anna", priority="low", progressDeadline=None)
    taken, free = d.names("low")[0], {"n0": "n1", "n1": "n0"}[d.names("low")[0]]
    d.wait(3600)
    for name in ("b", "c", "d"):
        d.submit(name, 1, user="ben", priority="low")
        d.tell(StartFailed(f"default/{name}", 1, "connection refused", (free,)))
        d.empty(name)
    d.submit("high", 1, user="anna", priority="high")
    assert d.names("high") == (free,)
    assert d.status("low").phase is Phase.RUNNING
    assert d.names("low") == (taken,)
    d.tell(StartFailed("default/high", 1, "no sandbox", (free,)))
    d.empty("high")
    d.submit("higher", 1, user="clara", priority="extreme-high")  # two users now
    assert d.names("higher") == (taken,)


def test_a_start_that_is_the_jobs_own_fault_counts_and_pauses_longer(
    desk: Callable, pick: Callable
) -> None:
    d = desk(one_zone(3))
    d.submit("a", 2, maxRestarts=2)
    pauses = []
    for attempt in (1, 2):
        actions = d.tell(StartFailed(A, attempt, "ImagePullBackOff", ("n0", "n1"), job_fault=True))
        assert pick(actions, Stop)  # its nodes are given back
        assert d.status("a").history.avoid == ()
        pauses.append(d.status("a").history.not_before - d.now)
        d.empty("a")
        d.wait(pauses[-1])
        assert d.status("a").phase is Phase.STARTING
    d.tell(StartFailed(A, 3, "ImagePullBackOff", (), job_fault=True))
    assert pauses == [60, 120]
    assert (d.status("a").phase, d.status("a").reason) == (Phase.FAILED, "MaxRestartsExceeded")


# -- many at once ---------------------------------------------------------------------------------


def drive(d: Any, keys: list[str], seconds: float, *, comes_up: bool) -> None:
    """Nodes empty at once and pods start, or not, for so long."""
    until = d.now + seconds
    while d.now < until:
        d.wait(60)
        for _ in range(2):
            jobs = [d.state.jobs[key] for key in keys]
            events: list[Event] = [
                NodeEmptied(one.name, job.key, one.attempt)
                for job in jobs
                for one in job.status.occupied
                if one.name in job.sent.stops
            ]
            if comes_up:
                events += [
                    GangStarted(job.key, job.status.history.attempt)
                    for job in jobs
                    if job.status.phase is Phase.STARTING
                ]
            if events:
                d.tell(*events)


def test_jobs_that_nobody_hears_are_left_alone(desk: Callable) -> None:
    d = desk(one_zone(10))
    keys = [f"default/j{index}" for index in range(10)]
    for key in keys:
        d.run(key.partition("/")[2], 1)
    d.tell(*(StreamLost(key, 1) for key in keys))
    drive(d, keys, 24 * 3600, comes_up=False)
    assert {d.state.jobs[key].status.history.restarts for key in keys} == {0}
    d.tell(*(StreamRestored(key, 1) for key in keys))
    d.wait(29 * 60)
    assert {d.state.jobs[key].status.history.restarts for key in keys} == {0}
    d.wait(60)  # the watchdog counts again
    assert {d.state.jobs[key].status.history.restarts for key in keys} == {1}


def test_one_job_without_a_stream_does_not_keep_its_nodes_for_ever(desk: Callable) -> None:
    d = desk(one_zone(4))
    for name in ("a", "b", "c"):
        d.run(name, 1, **({} if name == "a" else {"progressDeadline": None}))
    d.tell(StreamLost(A, 1))
    d.wait(59 * 60)
    assert d.status("a").history.restarts == 0
    d.wait(60)
    assert d.status("a").eviction.reason == "ProgressDeadlineExceeded"
    assert d.status("a").history.restarts_without_progress == 0


def test_an_outage_of_the_report_path_fails_no_job(desk: Callable) -> None:
    """Nothing is heard: neither progress nor that pods have started, and nobody reports that."""
    d = desk(one_zone(10))
    keys = [f"default/j{index}" for index in range(10)]
    for index, key in enumerate(keys):
        d.run(key.partition("/")[2], 1, user=f"u{index % 3}")
        d.tell(CheckpointReported(key, 1, 100, "/c"))
    drive(d, keys, 12 * 3600, comes_up=False)
    statuses = [d.state.jobs[key].status for key in keys]
    assert all(status.phase is not Phase.FAILED for status in statuses)
    assert max(status.history.restarts_without_progress for status in statuses) <= 1
    assert "the cluster is blamed" in statuses[0].eviction.message
    drive(d, keys, 1200, comes_up=True)
    assert {d.state.jobs[key].status.phase for key in keys} == {Phase.RUNNING}


def test_one_users_failing_jobs_open_no_breaker(desk: Callable) -> None:
    d = desk(one_zone(8))
    d.run("other", 1, user="anna", progressDeadline=None)
    keys = [f"default/j{index}" for index in range(4)]
    for key in keys:
        d.submit(key.partition("/")[2], 1, user="mallory", maxRestarts=2)
    drive(d, keys, 3 * 3600, comes_up=False)
    assert {d.state.jobs[key].status.reason for key in keys} == {"MaxRestartsExceeded"}


# -- objects that go and come ---------------------------------------------------------------------


def known(d: Any, name: str, **changes: Any) -> FlyerJob:
    """The object as it is stored, with its uid."""
    job = d.jobs[f"default/{name}"]
    return job.replace(status=d.state.jobs[job.key].status, **changes)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_job_that_is_back_is_no_ghost(desk: Callable, pick: Callable, *, forgotten: bool) -> None:
    d = desk(one_zone(2))
    d.run("a", 2)
    d.tell(CheckpointReported(A, 1, 7, "/c"))
    stored = known(d, "a")
    assert pick(d.tell(JobRemoved(A)), Stop)
    if forgotten:
        d.empty("a")
        assert A not in d.state.jobs
    d.tell(JobSubmitted(stored))
    d.empty("a")
    d.wait(60)
    status = d.status("a")
    assert (status.phase, status.history.attempt) == (Phase.STARTING, 2)
    assert status.eviction.reason == "ObjectVanished"
    assert status.history.restarts_without_progress == 0
    (start,) = [one for step in d.steps for one in pick(step[2], Start) if one.attempt == 2]
    assert start.restore_from.step == 7


def test_what_happened_while_the_object_was_gone_is_committed(
    desk: Callable, pick: Callable
) -> None:
    d = desk(one_zone(2))
    d.run("a", 2, maxRestarts=0)
    d.tell(PodExited(A, 1, "n0", Failed(1, "boom")))
    d.wait(5)
    stored = known(d, "a")
    assert len(stored.status.occupied) == 2
    d.tell(JobRemoved(A))
    d.tell(NodeEmptied("n0", A, 1))  # nothing is stored of it
    commits = pick(d.tell(JobSubmitted(stored)), Commit)
    assert [commit.status for commit in commits] == [d.status("a")]
    assert [one.name for one in d.status("a").occupied] == ["n1"]


def test_a_job_that_goes_and_comes_in_one_step_runs_on(desk: Callable, pick: Callable) -> None:
    d = desk(one_zone(2))
    d.run("a", 2)
    stored = known(d, "a")
    assert not pick(d.tell(JobRemoved(A), JobSubmitted(stored)), Stop)
    assert d.status("a").phase is Phase.RUNNING
    assert d.status("a").history.attempt == 1


def test_a_new_object_of_the_name_waits_for_the_old_ones_pods(desk: Callable) -> None:
    d = desk(one_zone(2))
    d.run("a", 2)
    other = sample_job("a", 1)
    other = other.replace(metadata=other.metadata.replace(uid="another"))
    d.tell(JobRemoved(A))
    d.tell(JobSubmitted(other))
    assert d.state.jobs[A].removed


def test_a_deleted_node_is_forgotten(desk: Callable) -> None:
    d = desk(one_zone(2))
    d.run("a", 1)
    d.tell(NodeRemoved("n1"))
    assert set(d.state.nodes) == {"n0"}
    d.submit("two", 2)
    assert d.status("two").pending.verdict == "Never"
    d.tell(NodeRemoved("n0"))
    assert d.status("a").eviction.reason == "NodeFailures"
    assert set(d.state.nodes) == {"n0"}  # until nothing of the job is there
    d.tell(NodeEmptied("n0", A, 1))
    assert set(d.state.nodes) == set()
    d.tell(NodeObserved(Node("n0", "A")))
    d.wait(60)
    assert d.status("a").phase is Phase.STARTING


def test_a_node_without_its_labels_keeps_its_gang(desk: Callable) -> None:
    d = desk(one_zone(1))
    d.run("a", 1)
    d.tell(NodeRemoved("n0", lost=False))
    assert d.status("a").phase is Phase.RUNNING
    d.submit("b", 1)
    assert d.status("b").pending.verdict == "Never"
    d.tell(replace(PodExited(A, 1, "n0", Failed(1))), NodeEmptied("n0", A, 1))
    assert set(d.state.nodes) == set()

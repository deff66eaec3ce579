"""Failure causes: the job, a node, or the whole cluster."""

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
    new_harness: Callable, *, fault_first: bool
) -> None:
    harness = new_harness(one_zone(4))
    harness.run("a", 2, maxRestarts=0)
    harness.step(CheckpointReported(A, 1, 100, "/c"))
    events: list[Event] = [broken("n0"), PodExited(A, 1, "n0", Failed(1, "CUDA error"))]
    for event in events if fault_first else reversed(events):
        harness.step(event)
        harness.wait(2)
    harness.empty("a")
    status = harness.status("a")
    assert status.eviction.reason == "HardwareFault"
    assert "n0 (Unhealthy (Xid79))" in status.eviction.message
    assert status.history.restarts_without_progress == 0
    assert status.assignment.names == ("n2", "n1")  # the node is replaced at its place


def test_a_recently_cleared_hardware_fault_explains_a_failure(new_harness: Callable) -> None:
    harness = new_harness(one_zone(2))
    harness.run("a", 1)
    harness.step(broken("n0"))
    harness.step(NodeObserved(Node("n0", "A")))
    harness.wait(60)
    harness.step(PodExited(A, 1, "n0", Failed(1, "CUDA error")))
    assert harness.status("a").eviction.reason == "HardwareFault"


@pytest.mark.parametrize(
    "node",
    [
        Node("n0", "A", ready=False, reason="drained by eve: maintenance"),
        Node("n3", "A", ready=False, reason="Unhealthy (Xid79)", fault="Unhealthy (Xid79)"),
    ],
)
def test_a_drain_or_a_node_of_another_job_does_not_explain_a_failure(
    new_harness: Callable, node: Node
) -> None:
    harness = new_harness(one_zone(4))
    harness.run("a", 1)
    harness.step(NodeObserved(node))
    harness.step(PodExited(A, 1, "n0", Failed(1, "ValueError")))
    assert harness.status("a").phase is Phase.FAILED


def test_an_old_hardware_fault_does_not_explain_a_failure(new_harness: Callable) -> None:
    harness = new_harness(one_zone(2))
    harness.run("a", 1, progressDeadline=None)
    harness.step(broken("n0"))
    harness.step(NodeObserved(Node("n0", "A")))
    harness.wait(3600)
    harness.step(PodExited(A, 1, "n0", Failed(1, "ValueError")))
    assert harness.status("a").phase is Phase.FAILED


# -- the first cause ------------------------------------------------------------------------------


def test_an_abort_after_another_ranks_failure_is_a_consequence(new_harness: Callable) -> None:
    harness = new_harness(one_zone(4))
    harness.run("a", 2)
    harness.step(
        PodExited(A, 1, "n0", Failed(1, "ValueError: boom")),
        PodExited(A, 1, "n1", Killed(6, "SIGABRT")),
    )
    status = harness.status("a")
    assert (status.phase, status.reason) == (Phase.FAILED, "RankFailed")
    assert "ValueError: boom" in status.message


@pytest.mark.parametrize(("signal", "reason"), [(11, "SIGSEGV"), (9, "OOMKilled")])
def test_a_repeated_crash_is_attributed_to_the_job(
    new_harness: Callable, signal: int, reason: str
) -> None:
    harness = new_harness(one_zone(8))
    harness.run("a", 1)
    for attempt in (1, 2, 3):
        assert harness.status("a").phase is Phase.RUNNING
        harness.step(PodExited(A, attempt, harness.names("a")[0], Killed(signal, reason)))
        harness.empty("a")
        harness.wait(60)
        if harness.status("a").phase is Phase.STARTING:
            harness.up("a")
    status = harness.status("a")
    assert (status.phase, status.reason) == (Phase.FAILED, "RankFailed")
    assert "3 attempts in a row" in status.message


def test_crashes_with_newer_checkpoints_between_them_are_not_consecutive(
    new_harness: Callable,
) -> None:
    harness = new_harness(one_zone(8))
    harness.run("a", 1)
    for attempt in range(1, 7):
        harness.step(CheckpointReported(A, attempt, 10 * attempt, "/c"))
        harness.step(PodExited(A, attempt, harness.names("a")[0], Killed(11)))
        harness.empty("a")
        harness.wait(60)
        harness.up("a")
    assert harness.status("a").phase is Phase.RUNNING


# -- starts ---------------------------------------------------------------------------------------


def test_a_node_on_which_pods_do_not_start_is_avoided(new_harness: Callable) -> None:
    harness = new_harness(one_zone(3))
    harness.submit("a", 1)
    (bad,) = harness.names("a")
    harness.wait(600)
    harness.empty("a")
    harness.wait(60)
    assert harness.status("a").phase is Phase.STARTING
    assert harness.names("a") != (bad,)


def test_the_node_that_a_start_waits_for_is_the_culprit(new_harness: Callable) -> None:
    harness = new_harness(one_zone(5))
    harness.submit("a", 2)
    harness.step(StartPending(A, 1, ("n1",)))
    harness.wait(600)
    harness.empty("a")
    harness.wait(60)
    assert harness.names("a") == ("n0", "n2")
    assert "on n1" in harness.status("a").eviction.message


def test_a_culprit_is_avoided_although_its_zone_fits_tighter(new_harness: Callable) -> None:
    harness = new_harness([Node("bad", "A"), Node("b0", "B"), Node("b1", "B"), Node("b2", "B")])
    harness.submit("a", 1)
    assert harness.names("a") == ("bad",)
    harness.step(StartFailed(A, 1, "FailedCreatePodSandBox", ("bad",)))
    harness.empty("a")
    harness.wait(60)
    assert harness.names("a") == ("b0",)
    assert harness.status("a").history.restarts_without_progress == 0


def test_lower_jobs_are_preempted_before_an_avoided_node_is_used(new_harness: Callable) -> None:
    harness = new_harness([Node("good", "A"), Node("then-bad", "A")])
    harness.run("low", 1, priority="low")
    harness.submit("a", 1, priority="high")
    assert (harness.names("low"), harness.names("a")) == (("good",), ("then-bad",))
    harness.step(StartFailed(A, 1, "no sandbox", ("then-bad",)))
    harness.empty("a")
    harness.wait(60)
    assert harness.names("a") == ("good",)
    assert harness.status("low").phase is Phase.SUSPENDING


def test_a_node_that_failed_two_jobs_is_avoided_by_a_third(new_harness: Callable) -> None:
    harness = new_harness(one_zone(3))
    for name in ("a", "b"):
        harness.submit(name, 1)
        harness.step(StartFailed(f"default/{name}", 1, "no sandbox", ("n0",)))
        harness.empty(name)
    harness.wait(1)
    harness.submit("c", 1)
    assert harness.names("c") != ("n0",)


def test_failed_starts_of_one_user_make_no_other_user_avoid_the_node(new_harness: Callable) -> None:
    """Otherwise one user's failing registry causes preemptions while nodes are idle."""
    harness = new_harness(one_zone(2))
    harness.run("low", 1, user="anna", priority="low", progressDeadline=None)
    used, free = harness.names("low")[0], {"n0": "n1", "n1": "n0"}[harness.names("low")[0]]
    harness.wait(3600)
    for name in ("b", "c", "d"):
        harness.submit(name, 1, user="ben", priority="low")
        harness.step(StartFailed(f"default/{name}", 1, "connection refused", (free,)))
        harness.empty(name)
    harness.submit("high", 1, user="anna", priority="high")
    assert harness.names("high") == (free,)
    assert harness.status("low").phase is Phase.RUNNING
    assert harness.names("low") == (used,)
    harness.step(StartFailed("default/high", 1, "no sandbox", (free,)))
    harness.empty("high")
    harness.submit("higher", 1, user="clara", priority="extreme-high")  # two users now
    assert harness.names("higher") == (used,)


def test_a_start_failure_caused_by_the_job_counts_and_pauses_longer(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness(one_zone(3))
    harness.submit("a", 2, maxRestarts=2)
    pauses = []
    for attempt in (1, 2):
        actions = harness.step(
            StartFailed(A, attempt, "ImagePullBackOff", ("n0", "n1"), job_fault=True)
        )
        assert pick(actions, Stop)  # its nodes are released
        assert harness.status("a").history.avoid == ()
        pauses.append(harness.status("a").history.not_before - harness.now)
        harness.empty("a")
        harness.wait(pauses[-1])
        assert harness.status("a").phase is Phase.STARTING
    harness.step(StartFailed(A, 3, "ImagePullBackOff", (), job_fault=True))
    assert pauses == [60, 120]
    assert (harness.status("a").phase, harness.status("a").reason) == (
        Phase.FAILED,
        "MaxRestartsExceeded",
    )


# -- simultaneous failures ------------------------------------------------------------------------


def drive(harness: Any, keys: list[str], seconds: float, *, comes_up: bool) -> None:
    """Runs for `seconds`: nodes empty immediately, and pods start or fail."""
    until = harness.now + seconds
    while harness.now < until:
        harness.wait(60)
        for _ in range(2):
            jobs = [harness.state.jobs[key] for key in keys]
            events: list[Event] = [
                NodeEmptied(node.name, job.key, node.attempt)
                for job in jobs
                for node in job.status.occupied
                if node.name in job.sent_actions.stops
            ]
            if comes_up:
                events += [
                    GangStarted(job.key, job.status.history.attempt)
                    for job in jobs
                    if job.status.phase is Phase.STARTING
                ]
            if events:
                harness.step(*events)


def test_jobs_without_reports_are_not_failed(new_harness: Callable) -> None:
    harness = new_harness(one_zone(10))
    keys = [f"default/j{index}" for index in range(10)]
    for key in keys:
        harness.run(key.partition("/")[2], 1)
    harness.step(*(StreamLost(key, 1) for key in keys))
    drive(harness, keys, 24 * 3600, comes_up=False)
    assert {harness.state.jobs[key].status.history.restarts for key in keys} == {0}
    harness.step(*(StreamRestored(key, 1) for key in keys))
    harness.wait(29 * 60)
    assert {harness.state.jobs[key].status.history.restarts for key in keys} == {0}
    harness.wait(60)  # the watchdog counts again
    assert {harness.state.jobs[key].status.history.restarts for key in keys} == {1}


def test_one_job_without_a_stream_does_not_keep_its_nodes(new_harness: Callable) -> None:
    harness = new_harness(one_zone(4))
    for name in ("a", "b", "c"):
        harness.run(name, 1, **({} if name == "a" else {"progressDeadline": None}))
    harness.step(StreamLost(A, 1))
    harness.wait(59 * 60)
    assert harness.status("a").history.restarts == 0
    harness.wait(60)
    assert harness.status("a").eviction.reason == "ProgressDeadlineExceeded"
    assert harness.status("a").history.restarts_without_progress == 0


def test_an_outage_of_the_report_path_fails_no_job(new_harness: Callable) -> None:
    """The operator receives neither progress nor starts of pods, and no error."""
    harness = new_harness(one_zone(10))
    keys = [f"default/j{index}" for index in range(10)]
    for index, key in enumerate(keys):
        harness.run(key.partition("/")[2], 1, user=f"u{index % 3}")
        harness.step(CheckpointReported(key, 1, 100, "/c"))
    drive(harness, keys, 12 * 3600, comes_up=False)
    statuses = [harness.state.jobs[key].status for key in keys]
    assert all(status.phase is not Phase.FAILED for status in statuses)
    assert max(status.history.restarts_without_progress for status in statuses) <= 1
    assert "the cluster is blamed" in statuses[0].eviction.message
    drive(harness, keys, 1200, comes_up=True)
    assert {harness.state.jobs[key].status.phase for key in keys} == {Phase.RUNNING}


def test_failing_jobs_of_one_user_do_not_open_the_circuit_breaker(new_harness: Callable) -> None:
    harness = new_harness(one_zone(8))
    harness.run("other", 1, user="anna", progressDeadline=None)
    keys = [f"default/j{index}" for index in range(4)]
    for key in keys:
        harness.submit(key.partition("/")[2], 1, user="mallory", maxRestarts=2)
    drive(harness, keys, 3 * 3600, comes_up=False)
    assert {harness.state.jobs[key].status.reason for key in keys} == {"MaxRestartsExceeded"}


# -- deleted objects that reappear ----------------------------------------------------------------


def stored_job(harness: Any, name: str, **changes: Any) -> FlyerJob:
    """The object as it is stored, with its uid."""
    job = harness.jobs[f"default/{name}"]
    return job.replace(status=harness.state.jobs[job.key].status, **changes)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_job_whose_object_returns_starts_again(
    new_harness: Callable, pick: Callable, *, forgotten: bool
) -> None:
    harness = new_harness(one_zone(2))
    harness.run("a", 2)
    harness.step(CheckpointReported(A, 1, 7, "/c"))
    stored = stored_job(harness, "a")
    assert pick(harness.step(JobRemoved(A)), Stop)
    if forgotten:
        harness.empty("a")
        assert A not in harness.state.jobs
    harness.step(JobSubmitted(stored))
    harness.empty("a")
    harness.wait(60)
    status = harness.status("a")
    assert (status.phase, status.history.attempt) == (Phase.STARTING, 2)
    assert status.eviction.reason == "ObjectVanished"
    assert status.history.restarts_without_progress == 0
    (start,) = [
        action for step in harness.steps for action in pick(step[2], Start) if action.attempt == 2
    ]
    assert start.restore_from.step == 7


def test_changes_during_the_absence_of_the_object_are_committed(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness(one_zone(2))
    harness.run("a", 2, maxRestarts=0)
    harness.step(PodExited(A, 1, "n0", Failed(1, "boom")))
    harness.wait(5)
    stored = stored_job(harness, "a")
    assert len(stored.status.occupied) == 2
    harness.step(JobRemoved(A))
    harness.step(NodeEmptied("n0", A, 1))  # nothing is stored of it
    commits = pick(harness.step(JobSubmitted(stored)), Commit)
    assert [commit.status for commit in commits] == [harness.status("a")]
    assert [node.name for node in harness.status("a").occupied] == ["n1"]


def test_a_job_removed_and_submitted_in_one_step_continues(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness(one_zone(2))
    harness.run("a", 2)
    stored = stored_job(harness, "a")
    assert not pick(harness.step(JobRemoved(A), JobSubmitted(stored)), Stop)
    assert harness.status("a").phase is Phase.RUNNING
    assert harness.status("a").history.attempt == 1


def test_a_new_object_with_the_same_name_waits_for_the_pods_of_the_old_one(
    new_harness: Callable,
) -> None:
    harness = new_harness(one_zone(2))
    harness.run("a", 2)
    other = sample_job("a", 1)
    other = other.replace(metadata=other.metadata.replace(uid="another"))
    harness.step(JobRemoved(A))
    harness.step(JobSubmitted(other))
    assert harness.state.jobs[A].removed


def test_a_deleted_node_is_forgotten(new_harness: Callable) -> None:
    harness = new_harness(one_zone(2))
    harness.run("a", 1)
    harness.step(NodeRemoved("n1"))
    assert set(harness.state.nodes) == {"n0"}
    harness.submit("two", 2)
    assert harness.status("two").pending.verdict == "Never"
    harness.step(NodeRemoved("n0"))
    assert harness.status("a").eviction.reason == "NodeFailures"
    assert set(harness.state.nodes) == {"n0"}  # until nothing of the job is there
    harness.step(NodeEmptied("n0", A, 1))
    assert set(harness.state.nodes) == set()
    harness.step(NodeObserved(Node("n0", "A")))
    harness.wait(60)
    assert harness.status("a").phase is Phase.STARTING


def test_a_node_without_its_labels_keeps_its_gang(new_harness: Callable) -> None:
    harness = new_harness(one_zone(1))
    harness.run("a", 1)
    harness.step(NodeRemoved("n0", lost=False))
    assert harness.status("a").phase is Phase.RUNNING
    harness.submit("b", 1)
    assert harness.status("b").pending.verdict == "Never"
    harness.step(replace(PodExited(A, 1, "n0", Failed(1))), NodeEmptied("n0", A, 1))
    assert set(harness.state.nodes) == set()

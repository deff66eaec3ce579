"""Ends of attempts: their cause, and the restart or end that follows."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import Phase
from flyer.engine import (
    Action,
    CheckpointReported,
    Failed,
    Finish,
    JobFault,
    JobSubmitted,
    Killed,
    LogObserved,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    PodExited,
    ProgressReported,
    Released,
    Start,
    StartRefused,
    Stop,
    Succeeded,
    SuspendRequested,
)
from flyer.engine.cycle import commits, reconcile, schedule
from flyer.sim import sample_job, two_zones

if TYPE_CHECKING:
    from collections.abc import Callable

A = "default/a"


def test_a_replacement_has_the_ranks_of_the_lost_node(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 4)
    harness.step(CheckpointReported(A, 1, 30, "/ckpt/30"))
    actions = harness.step(NodeLost("a1", "PowerLost", "no heartbeat"))
    (stop,) = pick(actions, Stop)
    assert stop.nodes == ("a0", "a1", "b0", "b1")
    assert harness.names("a") == ("a0", "a2", "b0", "b1")
    assert harness.status("a").phase is Phase.DRAINING  # its own survivors have to leave first
    actions = harness.step(*(NodeEmptied(name, A, 1) for name in ("a0", "b0", "b1")))
    (start,) = pick(actions, Start)
    assert start.restore_from.step == 30
    assert start.assignment.same_zone_layout is True
    assert [node.first_rank for node in start.assignment.nodes] == [0, 1, 2, 3]
    status = harness.status("a")
    assert (status.history.restarts, status.eviction and status.eviction.reason) == (
        1,
        "NodeFailures",
    )


def test_only_the_first_traceback_is_kept_in_full(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    for rank, node in enumerate(harness.names("a")):
        words = "Traceback\n" + "x" * 5000 + f"\nValueError: {rank}"
        outcome = Failed(1, f"rank {rank}: ValueError: {rank}", rank, words)
        harness.step(PodExited(A, 1, node, outcome))
    first, second = harness.status("a").exits
    assert (first.rank, len(first.traceback or "")) == (0, 4096)
    assert first.traceback.endswith("x\nValueError: 0")
    assert (second.rank, second.traceback) == (1, None)


def test_the_messages_of_thousands_of_exits_fit_into_an_object(new_harness: Callable) -> None:
    harness = new_harness(two_zones(600, slots=8))
    status = harness.run("a", 1200)
    last = harness.names("a")[-1]
    harness.step(*(PodExited(A, 1, name, Failed(1, "x" * 1024)) for name in harness.names("a")))
    status = harness.status("a")
    assert len(status.exits) == 1200
    assert len(status.exits[0].reason) == 1024
    assert (status.exits[-1].node, status.exits[-1].reason) == (last, "")
    # etcd takes 1.5 MB: as much again as this for each node leaves room for 5,000.
    assert len(json.dumps(status.to_object())) < 600_000


def test_a_lost_node_is_out_until_it_is_observed_ready(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(NodeLost("a1", "PowerLost"))
    harness.submit("a", 3, nodeClass="default", zone="A")
    assert harness.status("a").phase is Phase.QUEUED
    assert "a1 is out" in harness.status("a").pending.message
    harness.step(NodeObserved(harness.nodes[1]))
    assert harness.status("a").phase is Phase.STARTING


def test_a_killed_pod_is_attributed_to_the_infrastructure(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(PodExited(A, 1, "a0", Killed(9)))
    assert harness.status("a").eviction.reason == "PodKilled"
    assert harness.names("a")[0] != "a0"  # a spare in its place
    assert harness.names("a")[1] == "a1"


def test_a_failed_rank_ends_the_job(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(PodExited(A, 1, "a1", Failed(3, "ValueError: boom")))
    assert harness.status("a").phase is Phase.RUNNING  # there may be a reason for it elsewhere
    (stop,) = pick(harness.wait(5), Stop)
    status = harness.status("a")
    assert (status.phase, status.reason) == (Phase.FAILED, "RankFailed")
    assert status.message == "a rank on node a1 exited with status 3: ValueError: boom"
    assert not stop.kill  # its peers may write their last lines
    assert pick(harness.empty("a"), Finish)


def test_the_failure_window_ends_when_all_ranks_have_exited(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(PodExited(A, 1, "a0", Failed(1)), PodExited(A, 1, "a1", Failed(1)))
    assert harness.status("a").phase is Phase.FAILED


@pytest.mark.parametrize(
    "evidence", [NodeLost("a0", "PowerLost"), PodExited(A, 1, "a0", Killed(9))]
)
def test_peers_that_fail_because_of_a_loss_are_not_blamed(
    new_harness: Callable, evidence: object
) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(PodExited(A, 1, "a1", Failed(1, "peer lost")))
    harness.wait(2)
    harness.step(evidence)
    assert harness.status("a").eviction is not None
    assert harness.status("a").phase is not Phase.FAILED


def test_a_job_succeeds_once_every_node_has_succeeded(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(PodExited(A, 1, "a0", Succeeded()))
    assert harness.status("a").phase is Phase.RUNNING
    harness.step(PodExited(A, 1, "a1", Succeeded()))
    assert harness.status("a").phase is Phase.SUCCEEDED
    assert pick(harness.empty("a"), Finish)


def test_the_loss_of_a_node_after_its_success_has_no_effect(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(PodExited(A, 1, "a0", Succeeded()), NodeLost("a0", "PowerLost"))
    harness.step(PodExited(A, 1, "a1", Succeeded()))
    assert harness.status("a").phase is Phase.SUCCEEDED


def test_an_emptied_node_without_an_exit_counts_as_a_killed_pod(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(NodeEmptied("a0", A, 1))
    assert harness.status("a").eviction.reason == "PodKilled"


def test_exit_and_node_emptied_events_may_arrive_in_either_order(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 1)
    (name,) = harness.names("a")
    harness.step(NodeEmptied(name, A, 1), PodExited(A, 1, name, Succeeded()))
    assert harness.status("a").phase is Phase.SUCCEEDED


def test_progress_and_log_lines_reset_the_watchdog(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2, progressDeadline="30s")
    harness.wait(29)
    harness.step(LogObserved(A, 1))
    harness.wait(29)
    harness.step(ProgressReported(A, 1, 1))
    harness.wait(29)
    assert harness.status("a").history.attempt == 1
    harness.wait(1)
    assert harness.status("a").eviction.reason == "ProgressDeadlineExceeded"
    assert harness.status("a").eviction.suspend_code == 0  # killed, not asked: it would not answer


def test_pods_that_do_not_come_up_are_rolled_back(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness(start_deadline_seconds=20.0)
    harness.submit("a", 2)
    assert pick(harness.wait(20), Stop)
    assert harness.status("a").eviction.reason == "PodsReadyTimeout"


def test_restarts_without_a_newer_checkpoint_are_counted(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 1, maxRestarts=2)

    def kill() -> None:
        harness.step(
            PodExited(A, harness.status("a").history.attempt, harness.names("a")[0], Killed(9))
        )
        harness.empty("a")
        harness.wait(60)
        if harness.status("a").phase is Phase.STARTING:
            harness.up("a")

    kill()
    kill()
    assert harness.status("a").phase is Phase.RUNNING
    harness.step(CheckpointReported(A, harness.status("a").history.attempt, 10, "/ckpt/10"))
    kill()
    kill()
    assert harness.status("a").phase is Phase.RUNNING
    kill()
    status = harness.status("a")
    assert (status.phase, status.reason) == (Phase.FAILED, "MaxRestartsExceeded")
    assert "step 10" in status.message
    assert status.history.restarts == 4


def test_the_pause_grows_with_repeated_failures(new_harness: Callable) -> None:
    harness = new_harness(backoff_seconds=4.0)
    harness.run("a", 1)
    for pause in (0, 4, 8):
        harness.step(
            PodExited(A, harness.status("a").history.attempt, harness.names("a")[0], Killed(9))
        )
        harness.empty("a")
        if pause:
            assert harness.status("a").pending.reason == "RestartBackoff"
            harness.wait(pause - 0.5)
            assert harness.status("a").phase is Phase.QUEUED
            harness.wait(0.5)
        assert harness.status("a").phase is Phase.STARTING
        harness.up("a")


def test_the_creation_of_refused_pods_is_retried(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.submit("a", 2, maxRestarts=0)
    for attempt, pause_seconds in enumerate((60, 120, 240, 480, 600, 600), 1):
        assert harness.status("a").phase is Phase.STARTING
        harness.step(
            StartRefused(A, attempt - 1, "late"), StartRefused(A, attempt, "quota is full")
        )
        harness.empty("a")
        status = harness.status("a")
        assert (status.phase, status.pending.reason) == (Phase.QUEUED, "PodsRefused")
        assert status.pending.eta == harness.now + pause_seconds
        assert "quota is full" in status.pending.message
        assert (f"{attempt} times" in status.pending.message) == (attempt > 1)
        harness.restart()  # all of it is in the status
        assert not pick(harness.wait(pause_seconds - 1), Start)
        (start,) = pick(harness.wait(1), Start)
        assert start.attempt == attempt + 1
    assert harness.status("a").history.restarts == 0
    harness.up("a")
    assert harness.status("a").history.refusals == 0
    harness.step(StartRefused(A, attempt + 1, "it runs"))
    assert harness.status("a").phase is Phase.RUNNING


@pytest.mark.parametrize("change", ["another spec", "suspended and resumed", "unchanged"])
def test_a_changed_or_resumed_job_is_retried_immediately(
    new_harness: Callable, pick: Callable, change: str
) -> None:
    harness = new_harness()
    job = sample_job("a", 2)

    def submit(generation: int, **spec: Any) -> tuple[Action, ...]:
        metadata = job.metadata.replace(generation=generation)
        return harness.step(
            JobSubmitted(job.replace(metadata=metadata, spec=job.spec.replace(**spec)))
        )

    submit(1)
    for attempt in (1, 2):
        harness.step(StartRefused(A, attempt, "quota is full"))
        harness.empty("a")
        assert harness.status("a").history.refusals == attempt
        if attempt == 1:
            harness.wait(60)
    if change == "another spec":
        actions = submit(2, ranks_per_node=1)
    elif change == "suspended and resumed":
        submit(2, suspend=True)
        assert harness.status("a").phase is Phase.SUSPENDED
        actions = submit(3)
    else:
        actions = submit(1)
    if change == "unchanged":
        assert not pick(actions, Start)
        assert harness.status("a").history.refusals == 2
        return
    (start,) = pick(actions, Start)
    assert harness.status("a").history.refusals == 0
    harness.step(StartRefused(A, start.attempt, "quota is full"))
    harness.empty("a")
    assert harness.status("a").pending.eta == harness.now + 60


def test_a_job_with_refused_pods_preempts_no_job_for_a_while(new_harness: Callable) -> None:
    harness = new_harness(refused_backoff_seconds=30.0, refusal_cooldown_seconds=200.0)
    harness.run("a", 6)
    harness.wait(100)
    harness.submit("b", 6, priority="high")
    assert harness.status("a").phase is Phase.SUSPENDING
    harness.wait(30)  # its grace is over, and it is stopped
    harness.empty("a")
    assert harness.status("b").phase is Phase.STARTING
    harness.step(StartRefused("default/b", 1, "quota is full"))
    harness.empty("b")
    harness.up("a")
    harness.wait(229)
    assert harness.status("a").phase is Phase.RUNNING
    harness.wait(1)
    assert harness.status("a").phase is Phase.SUSPENDING


def test_a_job_with_repeatedly_refused_pods_preempts_less_often(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("runs", 6, priority="low", progressDeadline=None)
    harness.wait(60)
    interrupted_at: list[float] = []
    harness.submit("refused", 6, priority="high")
    for _ in range(24 * 60):
        if harness.status("runs").phase is Phase.SUSPENDING:
            interrupted_at.append(harness.now)
            harness.step(Released("default/runs", harness.status("runs").history.attempt))
            harness.empty("runs")
        if harness.status("refused").phase is Phase.STARTING:
            harness.step(
                StartRefused("default/refused", harness.status("refused").history.attempt, "quota")
            )
            harness.empty("refused")
        if harness.status("runs").phase is Phase.STARTING:
            harness.up("runs")
        harness.wait(60)
    pauses = [after - before for before, after in pairwise(interrupted_at)]
    assert len(interrupted_at) <= 8
    assert pauses[-1] > 2 * 3600


def test_an_internal_error_names_the_job_and_the_event_that_caused_it(
    new_harness: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = new_harness()
    harness.run("a", 1)
    harness.run("b", 1)
    before, bad = harness.state, CheckpointReported(A, 1, 7, "x" * 5000)
    with pytest.raises(JobFault, match="CheckpointReported") as excinfo:
        harness.step(CheckpointReported("default/b", 1, 7, "/b"), bad)
    assert (excinfo.value.job, excinfo.value.event) == (A, bad)
    assert harness.state is before
    for where, name in (
        (reconcile, "transitions"),
        (commits, "with_conditions"),
        (schedule, "pending_reasons"),
    ):
        with monkeypatch.context() as broken:
            broken.setattr(where, name, None)
            with pytest.raises(JobFault) as excinfo:
                harness.step(SuspendRequested(A), JobSubmitted(sample_job("c", 9)))
            assert (excinfo.value.job, excinfo.value.event) == (
                A if where is not schedule else "default/c",
                None,
            )


def test_steps_are_not_lost_twice(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 1)
    harness.step(CheckpointReported(A, 1, 10, "/ckpt/10"), ProgressReported(A, 1, 14))
    for attempt, lost_steps in ((1, 4), (2, 0)):
        harness.step(PodExited(A, attempt, harness.names("a")[0], Killed(9)))
        assert harness.status("a").eviction.lost_steps == lost_steps
        harness.empty("a")
        harness.wait(60)
        harness.up("a")


def test_a_new_leader_starts_no_pod_again_that_has_ended(
    new_harness: Callable, pick: Callable
) -> None:
    """The node of the pod that has ended counts as empty: another job may be given it."""
    harness = new_harness()
    harness.submit("a", 2)
    first, _ = harness.names("a")
    harness.restart()
    actions = harness.step(
        PodExited("default/a", 1, first, Failed(1, "boom")), NodeEmptied(first, "default/a", 1)
    )
    assert pick(actions, Start) == []
    actions = harness.wait(harness.settings.failure_window_seconds)
    assert [(stop.job, stop.attempt) for stop in pick(actions, Stop)] == [("default/a", 1)]
    harness.empty("a")
    assert harness.status("a").phase is Phase.FAILED

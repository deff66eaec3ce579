"""Suspend, resume and stop by users."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerJobStatus, Phase, SuspendCode
from flyer.engine import (
    CheckpointReported,
    Failed,
    Finish,
    GangStarted,
    JobRemoved,
    Killed,
    NodeObserved,
    PodExited,
    ProgressReported,
    Released,
    ResumeRequested,
    Signal,
    Start,
    Stop,
    StopRequested,
    Succeeded,
    SuspendReceived,
    SuspendRequested,
    UserStateSet,
)

if TYPE_CHECKING:
    from collections.abc import Callable

A = "default/a"


def test_suspend_saves_and_resume_restores(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(ProgressReported(A, 1, 41))
    actions = harness.step(SuspendRequested(A, "anna", "maintenance"))
    assert pick(actions, Signal)[0].reason == "Suspended"
    harness.step(SuspendReceived(A, 1))
    harness.step(CheckpointReported(A, 1, 42, "/ckpt/42"), Released(A, 1))
    harness.empty("a")
    status = harness.status("a")
    assert status.phase is Phase.SUSPENDED
    assert status.message == "suspended by anna: maintenance"
    assert not pick(harness.wait(3600), Start)
    (start,) = pick(harness.step(ResumeRequested(A)), Start)
    assert (start.attempt, start.restore_from.step) == (2, 42)
    assert harness.status("a").suspend_code is SuspendCode.NONE


def test_the_exposed_share_of_the_latest_step_is_in_the_status(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(ProgressReported(A, 1, 1, 30))
    assert harness.status("a").progress.exposed_percent == 30
    harness.step(ProgressReported(A, 1, 2, 0))
    harness.wait(60)
    assert harness.status("a").progress.exposed_percent == 0
    harness.step(ProgressReported(A, 1, 3))  # a script that no longer reports it
    harness.wait(60)
    assert harness.status("a").progress.exposed_percent is None


def test_a_job_on_a_drained_node_checkpoints_and_moves(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 2)
    drained_node, other = (
        next(node for node in harness.nodes if node.name == name) for name in harness.names("a")
    )
    assert not harness.step(NodeObserved(replace(other, ready=False, reason="cordoned")))[:-1]
    assert harness.status("a").phase is Phase.RUNNING
    harness.step(NodeObserved(other))
    harness.step(ProgressReported(A, 1, 41))
    why = "drained by anna: a new disk"
    drained = replace(drained_node, ready=False, reason=why, drain=why)
    (signal,) = pick(harness.step(NodeObserved(drained)), Signal)
    assert signal.reason == "NodeDrained"
    harness.restart()  # a new leader continues it
    harness.step(NodeObserved(drained))
    harness.step(CheckpointReported(A, 1, 42, "/ckpt/42"), Released(A, 1))
    harness.empty("a")
    status = harness.status("a")
    assert status.phase is Phase.STARTING
    assert drained_node.name not in harness.names("a")
    assert (status.eviction.reason, status.eviction.message) == (
        "NodeDrained", f"node {drained_node.name} is {why}",
    )  # fmt: skip
    assert (status.history.restarts, status.history.avoid) == (0, ())
    # A gang that only starts has nothing to save.
    other = next(node for node in harness.nodes if node.name == harness.names("a")[0])
    harness.step(NodeObserved(replace(other, ready=False, reason=why, drain=why)))
    assert harness.status("a").suspension.expired


def test_a_gang_that_fits_nowhere_else_waits_until_the_drain_is_over(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 6)
    node = replace(
        harness.nodes[0], ready=False, reason="drained by anna: x", drain="drained by anna: x"
    )
    harness.step(NodeObserved(node))
    harness.step(Released(A, 1))
    harness.empty("a")
    assert harness.status("a").phase is Phase.QUEUED
    assert "is out: drained by anna: x" in harness.status("a").pending.message
    harness.step(NodeObserved(harness.nodes[0]))
    assert harness.status("a").phase is Phase.STARTING


def test_suspend_codes_only_grow(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(SuspendReceived(A, 1))  # no suspension was requested
    assert harness.status("a").suspend_code is SuspendCode.NONE
    harness.step(SuspendRequested(A))
    harness.step(Released(A, 1))
    harness.step(SuspendReceived(A, 1))
    assert harness.status("a").suspend_code is SuspendCode.MAY_SUSPEND


@pytest.mark.parametrize(
    ("acknowledged", "outcome", "phase"),
    [
        (False, Succeeded(), Phase.SUCCEEDED),  # it ended before it knew
        (True, Succeeded(), Phase.SUSPENDED),  # it saved and left
        (True, Failed(1, "peer gone"), Phase.SUSPENDED),  # not held against it
        (False, Killed(15), Phase.SUSPENDED),
    ],
)
def test_exits_of_pods_while_suspending(
    new_harness: Callable, acknowledged: bool, outcome: object, phase: Phase
) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(SuspendRequested(A))
    if acknowledged:
        harness.step(SuspendReceived(A, 1))
    harness.step(*(PodExited(A, 1, name, outcome) for name in ("a0", "a1")))
    harness.empty("a")
    assert harness.status("a").phase is phase


def test_a_job_that_is_starting_has_nothing_to_save(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.submit("a", 2)
    actions = harness.step(SuspendRequested(A))
    assert pick(actions, Stop)[0].kill
    assert not pick(actions, Signal)
    harness.empty("a")
    assert harness.status("a").phase is Phase.SUSPENDED


def test_a_job_submitted_suspended_starts_when_resumed(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    assert not pick(harness.submit("a", 2, suspend=True), Start)
    assert harness.status("a").phase is Phase.SUSPENDED
    assert pick(harness.step(ResumeRequested(A)), Start)


def test_a_job_resumed_during_its_checkpoint_is_queued_again(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(SuspendRequested(A))
    harness.step(ResumeRequested(A))
    assert harness.status("a").phase is Phase.SUSPENDING  # a signal cannot be taken back
    harness.step(CheckpointReported(A, 1, 7, "/ckpt/7"), Released(A, 1))
    assert pick(harness.empty("a"), Start)


@pytest.mark.parametrize("kill", [False, True])
def test_stop_is_final(new_harness: Callable, pick: Callable, kill: bool) -> None:
    harness = new_harness()
    harness.run("a", 2)
    actions = harness.step(StopRequested(A, "anna", "enough", kill=kill))
    assert bool(pick(actions, Stop)) == kill
    assert bool(pick(actions, Signal)) != kill
    if not kill:
        harness.step(Released(A, 1))
    actions = harness.empty("a")
    assert (harness.status("a").phase, harness.status("a").reason) == (Phase.FAILED, "Stopped")
    assert harness.status("a").message == "stopped by anna: enough"
    assert pick(actions, Finish)
    assert not pick(harness.step(ResumeRequested(A)), Start)


def test_stop_ends_a_waiting_job_immediately(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.run("b", 6)
    harness.submit("a", 2)
    assert pick(harness.step(StopRequested(A)), Finish)


def test_stop_overrides_a_preemption(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 6)
    harness.wait(10)
    harness.submit("b", 6, priority="high")
    harness.step(StopRequested(A))
    harness.step(Released(A, 1))
    harness.empty("a")
    assert (harness.status("a").phase, harness.status("a").reason) == (Phase.FAILED, "Stopped")


def test_a_removed_job_is_forgotten_when_its_nodes_are_empty(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(JobRemoved(A))
    assert A in harness.state.jobs
    harness.empty("a")
    assert A not in harness.state.jobs


@pytest.mark.parametrize("ask", [SuspendRequested, StopRequested])
def test_the_requester_may_have_any_name(new_harness: Callable, ask: Any) -> None:
    """Kubernetes bounds no user's name, and a service account's has up to 339 characters."""
    harness = new_harness()
    harness.run("a", 1)
    harness.step(ask(A, "x" * 400 + "\ud800", "y" * 40_000))
    assert harness.status("a").suspension.by == "x" * 252 + "…"
    harness.step(StopRequested(A, "z" * 400, kill=True))
    assert harness.status("a").suspension.by == "z" * 252 + "…"
    FlyerJobStatus.model_validate(harness.status("a").to_object())


def test_a_job_may_release_its_nodes_without_a_request(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 2)
    assert pick(harness.step(Released(A, 1)), Stop)
    harness.empty("a")
    assert harness.status("a").history.attempt == 2


def test_late_messages_of_an_earlier_attempt_change_nothing(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(Released(A, 1))
    harness.empty("a")
    harness.up("a")
    before = harness.status("a")
    harness.step(
        Released(A, 1), SuspendReceived(A, 1), GangStarted(A, 1), UserStateSet(A, 1, 7),
        CheckpointReported(A, 1, 999, "/ckpt/999"), PodExited(A, 1, "a0", Failed(1)),
    )  # fmt: skip
    assert harness.status("a") == before


def test_the_user_state_is_kept_over_attempts(new_harness: Callable, pick: Callable) -> None:
    harness = new_harness()
    harness.run("a", 2)
    harness.step(UserStateSet(A, 1, 2**32 - 1), UserStateSet(A, 1, 2**32))
    harness.step(Released(A, 1))
    (start,) = pick(harness.empty("a"), Start)
    assert start.user_state == 2**32 - 1


def test_at_its_active_deadline_a_job_checkpoints_and_ends(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 2, activeDeadline="1m")
    (signal,) = pick(harness.wait(60), Signal)
    assert signal.reason == "DeadlineExceeded"
    harness.step(Released(A, 1))
    harness.empty("a")
    assert (harness.status("a").phase, harness.status("a").reason) == (
        Phase.FAILED,
        "DeadlineExceeded",
    )


def test_a_step_reported_within_the_commit_interval_is_stored_after_it(
    new_harness: Callable,
) -> None:
    harness = new_harness(progress_commit_seconds=10.0)
    harness.run("a", 2)
    harness.now += 10
    harness.step(ProgressReported(A, 1, 1))
    harness.now += 1
    harness.step(ProgressReported(A, 1, 7))
    assert harness.status("a").progress.step == 1
    harness.wait(10)  # without further reports of the job
    assert harness.status("a").progress.step == 7
    harness.restart()
    harness.step(ProgressReported(A, 1, 9))  # the sidecar reports once to a new leader
    harness.wait(10)
    assert harness.status("a").progress.step == 9

"""Suspend, resume and stop by people."""

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


def test_suspend_saves_and_resume_restores(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 2)
    d.tell(ProgressReported(A, 1, 41))
    actions = d.tell(SuspendRequested(A, "anna", "maintenance"))
    assert pick(actions, Signal)[0].reason == "Suspended"
    d.tell(SuspendReceived(A, 1))
    d.tell(CheckpointReported(A, 1, 42, "/ckpt/42"), Released(A, 1))
    d.empty("a")
    status = d.status("a")
    assert status.phase is Phase.SUSPENDED
    assert status.message == "suspended by anna: maintenance"
    assert not pick(d.wait(3600), Start)
    (start,) = pick(d.tell(ResumeRequested(A)), Start)
    assert (start.attempt, start.restore_from.step) == (2, 42)
    assert d.status("a").suspend_code is SuspendCode.NONE


def test_a_drained_node_is_left_with_a_checkpoint(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 2)
    gone, other = (next(node for node in d.nodes if node.name == name) for name in d.names("a"))
    assert not d.tell(NodeObserved(replace(other, ready=False, reason="cordoned")))[:-1]
    assert d.status("a").phase is Phase.RUNNING
    d.tell(NodeObserved(other))
    d.tell(ProgressReported(A, 1, 41))
    why = "drained by anna: a new disk"
    drained = replace(gone, ready=False, reason=why, drain=why)
    (signal,) = pick(d.tell(NodeObserved(drained)), Signal)
    assert signal.reason == "NodeDrained"
    d.restart()  # a new leader goes on with it
    d.tell(NodeObserved(drained))
    d.tell(CheckpointReported(A, 1, 42, "/ckpt/42"), Released(A, 1))
    d.empty("a")
    status = d.status("a")
    assert status.phase is Phase.STARTING
    assert gone.name not in d.names("a")
    assert (status.eviction.reason, status.eviction.message) == (
        "NodeDrained", f"node {gone.name} is {why}",
    )  # fmt: skip
    assert (status.history.restarts, status.history.avoid) == (0, ())
    # A gang that only starts has nothing to save.
    other = next(node for node in d.nodes if node.name == d.names("a")[0])
    d.tell(NodeObserved(replace(other, ready=False, reason=why, drain=why)))
    assert d.status("a").suspension.expired


def test_a_gang_that_fits_nowhere_else_waits_until_the_drain_is_over(desk: Callable) -> None:
    d = desk()
    d.run("a", 6)
    node = replace(d.nodes[0], ready=False, reason="drained by anna: x", drain="drained by anna: x")
    d.tell(NodeObserved(node))
    d.tell(Released(A, 1))
    d.empty("a")
    assert d.status("a").phase is Phase.QUEUED
    assert "is out: drained by anna: x" in d.status("a").pending.message
    d.tell(NodeObserved(d.nodes[0]))
    assert d.status("a").phase is Phase.STARTING


def test_suspend_codes_only_grow(desk: Callable) -> None:
    d = desk()
    d.run("a", 2)
    d.tell(SuspendReceived(A, 1))  # nobody asked yet
    assert d.status("a").suspend_code is SuspendCode.NONE
    d.tell(SuspendRequested(A))
    d.tell(Released(A, 1))
    d.tell(SuspendReceived(A, 1))
    assert d.status("a").suspend_code is SuspendCode.MAY_SUSPEND


@pytest.mark.parametrize(
    ("heard", "outcome", "phase"),
    [
        (False, Succeeded(), Phase.SUCCEEDED),  # it ended before it knew
        (True, Succeeded(), Phase.SUSPENDED),  # it saved and left
        (True, Failed(1, "peer gone"), Phase.SUSPENDED),  # not held against it
        (False, Killed(15), Phase.SUSPENDED),
    ],
)
def test_how_a_pod_may_leave_while_suspending(
    desk: Callable, heard: bool, outcome: object, phase: Phase
) -> None:
    d = desk()
    d.run("a", 2)
    d.tell(SuspendRequested(A))
    if heard:
        d.tell(SuspendReceived(A, 1))
    d.tell(*(PodExited(A, 1, name, outcome) for name in ("a0", "a1")))
    d.empty("a")
    assert d.status("a").phase is phase


def test_a_job_that_is_starting_has_nothing_to_save(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.submit("a", 2)
    actions = d.tell(SuspendRequested(A))
    assert pick(actions, Stop)[0].kill
    assert not pick(actions, Signal)
    d.empty("a")
    assert d.status("a").phase is Phase.SUSPENDED


def test_a_job_submitted_suspended_waits_for_nobody(desk: Callable, pick: Callable) -> None:
    d = desk()
    assert not pick(d.submit("a", 2, suspend=True), Start)
    assert d.status("a").phase is Phase.SUSPENDED
    assert pick(d.tell(ResumeRequested(A)), Start)


def test_resumed_while_it_still_saves_it_queues_again(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 2)
    d.tell(SuspendRequested(A))
    d.tell(ResumeRequested(A))
    assert d.status("a").phase is Phase.SUSPENDING  # a signal cannot be taken back
    d.tell(CheckpointReported(A, 1, 7, "/ckpt/7"), Released(A, 1))
    assert pick(d.empty("a"), Start)


@pytest.mark.parametrize("kill", [False, True])
def test_stop_is_final(desk: Callable, pick: Callable, kill: bool) -> None:
    d = desk()
    d.run("a", 2)
    actions = d.tell(StopRequested(A, "anna", "enough", kill=kill))
    assert bool(pick(actions, Stop)) == kill
    assert bool(pick(actions, Signal)) != kill
    if not kill:
        d.tell(Released(A, 1))
    actions = d.empty("a")
    assert (d.status("a").phase, d.status("a").reason) == (Phase.FAILED, "Stopped")
    assert d.status("a").message == "stopped by anna: enough"
    assert pick(actions, Finish)
    assert not pick(d.tell(ResumeRequested(A)), Start)


def test_stop_ends_a_waiting_job_at_once(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("b", 6)
    d.submit("a", 2)
    assert pick(d.tell(StopRequested(A)), Finish)


def test_stop_overrules_a_preemption(desk: Callable) -> None:
    d = desk()
    d.run("a", 6)
    d.wait(10)
    d.submit("b", 6, priority="high")
    d.tell(StopRequested(A))
    d.tell(Released(A, 1))
    d.empty("a")
    assert (d.status("a").phase, d.status("a").reason) == (Phase.FAILED, "Stopped")


def test_a_removed_job_is_forgotten_when_its_nodes_are_empty(desk: Callable) -> None:
    d = desk()
    d.run("a", 2)
    d.tell(JobRemoved(A))
    assert A in d.state.jobs
    d.empty("a")
    assert A not in d.state.jobs


@pytest.mark.parametrize("ask", [SuspendRequested, StopRequested])
def test_who_asked_may_have_any_name(desk: Callable, ask: Any) -> None:
    """Kubernetes bounds no user's name, and a service account's has up to 339 characters."""
    d = desk()
    d.run("a", 1)
    d.tell(ask(A, "x" * 400 + "\ud800", "y" * 40_000))
    assert d.status("a").suspension.by == "x" * 252 + "…"
    d.tell(StopRequested(A, "z" * 400, kill=True))
    assert d.status("a").suspension.by == "z" * 252 + "…"
    FlyerJobStatus.model_validate(d.status("a").to_object())


def test_a_job_may_yield_unasked(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 2)
    assert pick(d.tell(Released(A, 1)), Stop)
    d.empty("a")
    assert d.status("a").history.attempt == 2


def test_late_words_of_an_earlier_attempt_change_nothing(desk: Callable) -> None:
    d = desk()
    d.run("a", 2)
    d.tell(Released(A, 1))
    d.empty("a")
    d.up("a")
    before = d.status("a")
    d.tell(
        Released(A, 1), SuspendReceived(A, 1), GangStarted(A, 1), UserStateSet(A, 1, 7),
        CheckpointReported(A, 1, 999, "/ckpt/999"), PodExited(A, 1, "a0", Failed(1)),
    )  # fmt: skip
    assert d.status("a") == before


def test_the_user_state_outlives_attempts(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 2)
    d.tell(UserStateSet(A, 1, 2**32 - 1), UserStateSet(A, 1, 2**32))
    d.tell(Released(A, 1))
    (start,) = pick(d.empty("a"), Start)
    assert start.user_state == 2**32 - 1


def test_max_runtime_saves_and_ends(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 2, activeDeadline="1m")
    (signal,) = pick(d.wait(60), Signal)
    assert signal.reason == "DeadlineExceeded"
    d.tell(Released(A, 1))
    d.empty("a")
    assert (d.status("a").phase, d.status("a").reason) == (Phase.FAILED, "DeadlineExceeded")


def test_a_step_that_came_too_soon_is_shown_in_its_time(desk: Callable) -> None:
    d = desk(progress_commit_seconds=10.0)
    d.run("a", 2)
    d.now += 10
    d.tell(ProgressReported(A, 1, 1))
    d.now += 1
    d.tell(ProgressReported(A, 1, 7))
    assert d.status("a").progress.step == 1
    d.wait(10)  # and the job says nothing meanwhile
    assert d.status("a").progress.step == 7
    d.restart()
    d.tell(ProgressReported(A, 1, 9))  # what its sidecar tells a new leader, once
    d.wait(10)
    assert d.status("a").progress.step == 9

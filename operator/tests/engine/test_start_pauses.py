"""Pauses after failed starts: short after a hiccup, long where only a change helps, and spread."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import Phase
from flyer.engine import (
    Commit,
    GangStarted,
    JobSubmitted,
    Killed,
    Node,
    NodeEmptied,
    NodeObserved,
    PodExited,
    ProgressReported,
    Start,
    StartFailed,
    StartRefused,
)
from flyer.sim import sample_job

if TYPE_CHECKING:
    from collections.abc import Callable

A = "default/a"


def one_zone(count: int) -> list[Node]:
    return [Node(f"n{index}", "A") for index in range(count)]


def pause(harness: Any, name: str = "a") -> float:
    not_before = harness.status(name).history.not_before
    return 0.0 if not_before is None else not_before - harness.now


@pytest.mark.parametrize("kind", ["refused", "failed"])
def test_pauses_after_a_hiccup_start_short_and_grow(
    new_harness: Callable[..., Any], pick: Callable[..., Any], kind: str
) -> None:
    harness = new_harness(one_zone(12), avoid_max=1)
    harness.submit("a", 2, maxRestarts=0)
    pauses = []
    for attempt in range(1, 12):
        node = harness.names("a")[0]
        harness.step(
            StartRefused(A, attempt, "503 etcd has no leader", transient=True)
            if kind == "refused"
            else StartFailed(A, attempt, "no sandbox", (node,))
        )
        harness.empty("a")
        pauses.append(pause(harness))
        harness.restart()  # all of it is in the status
        assert not pick(harness.wait(pauses[-1] - 0.5), Start)
        assert pick(harness.wait(0.5), Start)
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]
    assert harness.status("a").history.restarts_without_progress == 0


def test_a_refusal_that_needs_a_change_pauses_long(new_harness: Callable[..., Any]) -> None:
    harness = new_harness()
    harness.submit("a", 2)
    harness.step(StartRefused(A, 1, "exceeded quota"))
    assert pause(harness) == 60


def test_a_failure_that_counts_pauses_long(new_harness: Callable[..., Any]) -> None:
    """A short outage, for example of a registry, must not use up all restarts."""
    harness = new_harness()
    harness.submit("a", 2, maxRestarts=2)
    harness.step(StartFailed(A, 1, "no such image", ("a0",), job_fault=True))
    assert pause(harness) == 60
    assert harness.status("a").history.restarts_without_progress == 1


def test_a_transient_refusal_ends_preemptions_for_a_short_time(
    new_harness: Callable[..., Any],
) -> None:
    harness = new_harness(one_zone(2))
    harness.run("low", 2, priority="low")
    harness.wait(60)
    harness.submit("a", 2, priority="high")
    harness.empty("low")
    assert harness.status("a").phase is Phase.DRAINING
    low = "default/low"
    nodes = [NodeEmptied(node.name, low, 1) for node in harness.status("low").occupied]
    harness.step(*nodes)
    harness.step(StartRefused(A, harness.status("a").history.attempt, "503", transient=True))
    harness.empty("a")
    harness.step()
    assert harness.status("low").phase is Phase.STARTING  # on the idle nodes
    harness.up("low")
    harness.wait(2)
    assert harness.status("low").phase is Phase.RUNNING
    harness.wait(60)
    assert harness.status("low").phase is Phase.SUSPENDING


def test_retries_of_many_refused_jobs_are_spread_fairly(new_harness: Callable[..., Any]) -> None:
    count, rate = 300, 10.0
    harness = new_harness(one_zone(count + 1), start_retries_per_second=rate)
    jobs = [sample_job(f"j{index:03}") for index in range(count)]
    other = sample_job("other")
    other = other.replace(metadata=other.metadata.replace(namespace="lab"))
    harness.step(*map(JobSubmitted, [*jobs, other]))
    keys = [job.key for job in jobs]
    events = [StartRefused(key, 1, "503", transient=True) for key in [*keys, other.key]]
    harness.step(*events)
    histories = {key: job.status.history for key, job in harness.state.jobs.items()}
    pauses = {key: history.not_before - harness.now for key, history in histories.items()}
    assert pauses[other.key] <= 2.0
    assert min(pauses.values()) == 2.0
    assert max(pauses.values()) == pytest.approx(count / rate, abs=1.0)
    per_second = Counter(int(seconds) for seconds in pauses.values())
    assert max(per_second.values()) <= 4 * rate  # the first turns share the shortest pause


def test_a_job_that_ran_for_long_restarts_as_after_its_first_failure(
    new_harness: Callable[..., Any],
) -> None:
    harness = new_harness(one_zone(3), hardware_fault_seconds=1.0)
    harness.submit("a", 1)
    pauses = []
    for attempt, ran_seconds in enumerate((10, 10, 10, 700, 10), 1):
        harness.step(GangStarted(A, attempt))
        harness.wait(ran_seconds)
        (name,) = harness.names("a")
        fault = Node(name, "A", ready=False, reason="Xid79", fault="Xid79")
        harness.step(
            NodeObserved(fault),
            PodExited(A, attempt, name, Killed(9)),
            NodeEmptied(name, A, attempt),
        )
        harness.step(NodeObserved(Node(name, "A")))
        pauses.append(pause(harness))
        assert harness.status("a").history.restarts_without_progress == 0
        harness.wait(max(pauses[-1], 2.0))
        assert harness.status("a").phase is Phase.STARTING
    assert pauses == [0, 1, 2, 0, 1]


def test_progress_is_stored_although_the_state_is_rebuilt_often(
    new_harness: Callable[..., Any], pick: Callable[..., Any]
) -> None:
    harness = new_harness()
    harness.run("a", 1)
    steps = []
    for step in range(1, 11):
        harness.restart()
        harness.now += 3.0
        commits = pick(harness.step(ProgressReported(A, 1, step)), Commit)
        steps += [commit.status.progress.step for commit in commits]
    assert steps == [1, 3, 5, 7, 9]

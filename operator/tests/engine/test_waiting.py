"""Waiting jobs: their reasons, their positions, and backfill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api import Phase
from flyer.engine import (
    CheckpointReported,
    JobSubmitted,
    NodeLost,
    NodeObserved,
    PodExited,
    Released,
    Signal,
    StopRequested,
    Succeeded,
    UnknownJob,
    explain,
)
from flyer.sim import sample_job, two_zones

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("spec", "reason", "text"),
    [
        ({"nodes": 7}, "InsufficientNodes", "wants 7 nodes, the cluster has 6 in all"),
        (
            {"nodes": 1, "nodeClass": "h800"},
            "NoMatchingNodeClass",
            "no node has node class h800; there",
        ),
        (
            {"nodes": 1, "nodeClass": "default", "zone": "C"},
            "NoMatchingZone",
            "has no zone C; it has A, B",
        ),
        (
            {"nodes": 4, "nodeClass": "default", "zone": "A"},
            "TopologyPlacementFailed",
            "zone A, which has 3",
        ),
        ({"nodes": 4, "crossZone": "Never"}, "TopologyPlacementFailed", "the largest has 3"),
        ({"nodes": 1, "ranksPerNode": 9}, "InsufficientSlots", "more than any node has slots"),
    ],
)
def test_jobs_that_can_never_run_are_reported_immediately(
    new_harness: Callable, spec: dict, reason: str, text: str
) -> None:
    harness = new_harness()
    harness.submit("a", **spec)
    status = harness.status("a")
    assert status.phase is Phase.QUEUED
    assert (status.pending.verdict, status.pending.reason) == ("Never", reason)
    assert text in status.pending.message
    assert explain(harness.state, "default/a", harness.now).verdict == "never"


def test_a_job_waits_for_lost_nodes_to_return(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(*(NodeLost(node.name, "PowerLost") for node in harness.nodes))
    harness.submit("a", 6)
    assert harness.status("a").pending.verdict == "Pending"
    harness.step(*(NodeObserved(node) for node in harness.nodes))
    assert harness.status("a").phase is Phase.STARTING


def test_a_gang_without_a_node_class_does_not_mix_classes(new_harness: Callable) -> None:
    harness = new_harness(
        two_zones(2, node_class="a100") + _renamed(two_zones(2, node_class="h800"))
    )
    harness.submit("a", 5)
    assert harness.status("a").pending.verdict == "Never"
    harness.submit("b", 4)
    assert {name[0] for name in harness.names("b")} <= {"a", "b"}


def _renamed(nodes: list) -> list:
    from dataclasses import replace

    return [replace(node, name=f"x{node.name}") for node in nodes]


def test_a_preempted_job_keeps_its_queue_position(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("zero", 6)
    harness.now += 10
    harness.submit("b", 6)
    harness.submit("urgent", 6, priority="high")
    harness.now += 1
    harness.submit("a", 6)
    harness.step(Released("default/zero", 1))
    harness.empty("zero")
    harness.up("urgent")
    positions = [
        explain(harness.state, f"default/{name}", harness.now).position
        for name in ("zero", "b", "a")
    ]
    assert positions == [1, 2, 3]
    harness.step(StopRequested("default/urgent", kill=True))
    harness.empty("urgent")
    assert harness.status("zero").phase is Phase.STARTING
    assert [harness.status(name).phase for name in "ab"] == [Phase.QUEUED, Phase.QUEUED]


def test_small_jobs_that_end_in_time_are_backfilled(new_harness: Callable) -> None:
    harness = new_harness(start_deadline_seconds=30.0)
    stays = {"checkpointGracePeriod": "1m", "maxCheckpointGracePeriod": "1m", "minRuntime": "2h"}
    harness.run("first", 4, activeDeadline="2h")
    harness.submit("large", 6)
    assert harness.status("large").pending.eta == harness.now + 2 * 3600 + 60
    harness.submit("too-long", 1, activeDeadline="2h", preemption=stays)
    harness.submit("stays", 1, preemption=stays)
    harness.submit("short", 1, activeDeadline="1h", preemption=stays)
    harness.submit("leaves", 1)
    phases = [harness.status(name).phase for name in ("too-long", "stays", "short", "leaves")]
    assert phases == [Phase.QUEUED, Phase.QUEUED, Phase.STARTING, Phase.STARTING]
    assert "default/large is ahead" in harness.status("stays").pending.message
    # One ends by itself in time, the other may have to be asked.
    assert not harness.status("short").assignment.backfill
    assert harness.status("leaves").assignment.backfill


def test_backfill_releases_the_nodes_when_the_large_job_can_start(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("first", 4, progressDeadline=None)
    harness.submit("large", 6)
    harness.run("small", 1, progressDeadline=None)
    harness.wait(3600)
    assert harness.status("small").phase is Phase.RUNNING
    for name in harness.names("first"):
        harness.step(PodExited("default/first", 1, name, Succeeded()))
    harness.empty("first")
    assert harness.status("large").phase is Phase.DRAINING
    assert harness.status("small").phase is Phase.SUSPENDING
    harness.step(Released("default/small", 1))
    harness.empty("small")
    assert harness.status("large").phase is Phase.STARTING
    assert harness.status("small").phase is Phase.QUEUED


def test_a_raised_active_deadline_does_not_extend_backfill(
    new_harness: Callable, pick: Callable
) -> None:
    """A job that was backfilled because it ends in time ends at that time, even if its deadline is
    raised later.
    """
    harness = new_harness(start_deadline_seconds=30.0)
    stays = {"checkpointGracePeriod": "1m", "maxCheckpointGracePeriod": "1m", "minRuntime": "2h"}
    harness.run("first", 4, activeDeadline="2h", progressDeadline=None)
    harness.submit("large", 6)
    eta = harness.status("large").pending.eta
    harness.run("liar", 1, activeDeadline="1h", preemption=stays, progressDeadline=None)
    assert not harness.status("liar").assignment.backfill
    for change in ({"activeDeadline": "100h"}, {}):
        spec = {"activeDeadline": None, "preemption": stays, "progressDeadline": None, **change}
        harness.step(JobSubmitted(sample_job("liar", 1, **spec)))
    (signal,) = pick(harness.wait(3600), Signal)
    assert (signal.job, signal.reason) == ("default/liar", "DeadlineExceeded")
    harness.wait(60)  # it does not save: the end of its grace
    harness.empty("liar")
    assert harness.status("liar").phase is Phase.FAILED
    harness.now = eta
    harness.step(Released("default/first", 1))
    harness.empty("first")
    assert harness.status("large").phase is Phase.STARTING


def test_a_max_runtime_may_be_lowered_while_the_job_runs(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness()
    harness.run("a", 1, activeDeadline="2h", progressDeadline=None)
    harness.step(JobSubmitted(sample_job("a", 1, activeDeadline="1h", progressDeadline=None)))
    assert pick(harness.wait(3600), Signal)


def test_nodes_that_the_large_job_does_not_wait_for_are_used(new_harness: Callable) -> None:
    harness = new_harness(two_zones(3))
    harness.run("first", 2, nodeClass="default", zone="A")
    harness.submit("large", 3, nodeClass="default", zone="A")
    harness.submit("small", 3, nodeClass="default", zone="B")
    assert harness.status("large").phase is Phase.QUEUED
    assert harness.status("small").phase is Phase.STARTING


def test_explain_names_all_holders_with_numbers(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("busy", 3, nodeClass="default", zone="A", user="anna")
    harness.run("big", 2, nodeClass="default", zone="B", user="ben", priority="high")
    harness.wait(100)
    harness.step(CheckpointReported("default/busy", 1, 5, "/ckpt/5"), NodeLost("b2", "Xid79"))
    harness.submit("a", 3)
    explanation = explain(harness.state, "default/a", harness.now)
    assert (explanation.verdict, explanation.position) == ("cannot", 1)
    assert explanation.summary == "cannot start now: 3 of 3 nodes missing (0 free: 0 in A, 0 in B)"
    by_job = {blocker.job: blocker for blocker in explanation.blockers if blocker.job}
    assert by_job["default/busy"].user == "anna"
    assert by_job["default/busy"].message == "default/busy of anna has 3 at priority normal"
    assert by_job["default/big"].since is not None
    assert [blocker.node for blocker in explanation.blockers if blocker.node] == ["b2"]
    # busy has just saved: preempting it costs only its restart. With b2 back, big is an option.
    assert explanation.remedies[0].command == "flyer suspend default/busy"
    assert explanation.remedies[0].cost_node_seconds == 3 * 60
    assert (explanation.remedies[-1].command, explanation.remedies[-1].node) == ("", "b2")


def test_explain_names_victims_and_preemptors(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 6)
    harness.wait(10)
    harness.submit("b", 6, priority="high")
    explanation = explain(harness.state, "default/b", harness.now)
    assert (explanation.verdict, explanation.blockers[0].job) == ("can", "default/a")
    assert explanation.blockers[0].until == harness.now + 10
    harness.step(Released("default/a", 1))
    harness.empty("a")
    explanation = explain(harness.state, "default/a", harness.now)
    assert (explanation.verdict, explanation.preempted_by) == ("cannot", "default/b")


def test_explain_changes_nothing(new_harness: Callable) -> None:
    harness = new_harness()
    harness.run("a", 6)
    harness.submit("b", 6)
    before = harness.state
    explain(harness.state, "default/b", harness.now + 1000)
    assert harness.state == before


def test_explain_reports_an_unknown_job(new_harness: Callable) -> None:
    with pytest.raises(UnknownJob, match="job default/missing does not exist"):
        explain(new_harness().state, "default/missing", 0.0)

"""Why a job waits, what it waits for, and who may go ahead of it."""

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
def test_what_can_never_run_is_said_at_once(
    desk: Callable, spec: dict, reason: str, text: str
) -> None:
    d = desk()
    d.submit("a", **spec)
    status = d.status("a")
    assert status.phase is Phase.QUEUED
    assert (status.pending.verdict, status.pending.reason) == ("Never", reason)
    assert text in status.pending.message
    assert explain(d.state, "default/a", d.now).verdict == "never"


def test_a_cluster_whose_nodes_are_out_is_a_matter_of_waiting(desk: Callable) -> None:
    d = desk()
    d.tell(*(NodeLost(node.name, "PowerLost") for node in d.nodes))
    d.submit("a", 6)
    assert d.status("a").pending.verdict == "Pending"
    d.tell(*(NodeObserved(node) for node in d.nodes))
    assert d.status("a").phase is Phase.STARTING


def test_a_gang_without_a_group_does_not_mix_classes(desk: Callable) -> None:
    d = desk(two_zones(2, node_class="a100") + _renamed(two_zones(2, node_class="h800")))
    d.submit("a", 5)
    assert d.status("a").pending.verdict == "Never"
    d.submit("b", 4)
    assert {name[0] for name in d.names("b")} <= {"a", "b"}


def _renamed(nodes: list) -> list:
    from dataclasses import replace

    return [replace(node, name=f"x{node.name}") for node in nodes]


def test_a_resumed_chain_has_kept_its_place(desk: Callable) -> None:
    d = desk()
    d.run("zero", 6)
    d.now += 10
    d.submit("b", 6)
    d.submit("urgent", 6, priority="high")
    d.now += 1
    d.submit("a", 6)
    d.tell(Released("default/zero", 1))
    d.empty("zero")
    d.up("urgent")
    told = [explain(d.state, f"default/{name}", d.now).position for name in ("zero", "b", "a")]
    assert told == [1, 2, 3]
    d.tell(StopRequested("default/urgent", kill=True))
    d.empty("urgent")
    assert d.status("zero").phase is Phase.STARTING
    assert [d.status(name).phase for name in "ab"] == [Phase.QUEUED, Phase.QUEUED]


def test_small_jobs_that_are_back_in_time_go_ahead(desk: Callable) -> None:
    d = desk(start_deadline_seconds=30.0)
    stays = {"checkpointGracePeriod": "1m", "maxCheckpointGracePeriod": "1m", "minRuntime": "2h"}
    d.run("first", 4, activeDeadline="2h")
    d.submit("large", 6)
    assert d.status("large").pending.eta == d.now + 2 * 3600 + 60
    d.submit("too-long", 1, activeDeadline="2h", preemption=stays)
    d.submit("stays", 1, preemption=stays)
    d.submit("short", 1, activeDeadline="1h", preemption=stays)
    d.submit("leaves", 1)
    phases = [d.status(name).phase for name in ("too-long", "stays", "short", "leaves")]
    assert phases == [Phase.QUEUED, Phase.QUEUED, Phase.STARTING, Phase.STARTING]
    assert "default/large is ahead" in d.status("stays").pending.message
    # One ends by itself in time, the other may have to be asked.
    assert not d.status("short").assignment.backfill
    assert d.status("leaves").assignment.backfill


def test_backfill_gives_the_nodes_back_when_the_large_one_can_start(desk: Callable) -> None:
    d = desk()
    d.run("first", 4, progressDeadline=None)
    d.submit("large", 6)
    d.run("small", 1, progressDeadline=None)
    d.wait(3600)
    assert d.status("small").phase is Phase.RUNNING
    for name in d.names("first"):
        d.tell(PodExited("default/first", 1, name, Succeeded()))
    d.empty("first")
    assert d.status("large").phase is Phase.DRAINING
    assert d.status("small").phase is Phase.SUSPENDING
    d.tell(Released("default/small", 1))
    d.empty("small")
    assert d.status("large").phase is Phase.STARTING
    assert d.status("small").phase is Phase.QUEUED


def test_a_false_max_runtime_buys_no_time(desk: Callable, pick: Callable) -> None:
    """A job that started early because it ends in time ends then, whatever it asks for later."""
    d = desk(start_deadline_seconds=30.0)
    stays = {"checkpointGracePeriod": "1m", "maxCheckpointGracePeriod": "1m", "minRuntime": "2h"}
    d.run("first", 4, activeDeadline="2h", progressDeadline=None)
    d.submit("large", 6)
    eta = d.status("large").pending.eta
    d.run("liar", 1, activeDeadline="1h", preemption=stays, progressDeadline=None)
    assert not d.status("liar").assignment.backfill
    for asked in ({"activeDeadline": "100h"}, {}):
        spec = {"activeDeadline": None, "preemption": stays, "progressDeadline": None, **asked}
        d.tell(JobSubmitted(sample_job("liar", 1, **spec)))
    (signal,) = pick(d.wait(3600), Signal)
    assert (signal.job, signal.reason) == ("default/liar", "DeadlineExceeded")
    d.wait(60)  # it does not save: the end of its grace
    d.empty("liar")
    assert d.status("liar").phase is Phase.FAILED
    d.now = eta
    d.tell(Released("default/first", 1))
    d.empty("first")
    assert d.status("large").phase is Phase.STARTING


def test_a_max_runtime_may_be_lowered_while_the_job_runs(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("a", 1, activeDeadline="2h", progressDeadline=None)
    d.tell(JobSubmitted(sample_job("a", 1, activeDeadline="1h", progressDeadline=None)))
    assert pick(d.wait(3600), Signal)


def test_nodes_that_the_large_one_does_not_wait_for_are_used(desk: Callable) -> None:
    d = desk(two_zones(3))
    d.run("first", 2, nodeClass="default", zone="A")
    d.submit("large", 3, nodeClass="default", zone="A")
    d.submit("small", 3, nodeClass="default", zone="B")
    assert d.status("large").phase is Phase.QUEUED
    assert d.status("small").phase is Phase.STARTING


def test_explain_names_everybody_with_numbers(desk: Callable) -> None:
    d = desk()
    d.run("busy", 3, nodeClass="default", zone="A", user="anna")
    d.run("big", 2, nodeClass="default", zone="B", user="ben", priority="high")
    d.wait(100)
    d.tell(CheckpointReported("default/busy", 1, 5, "/ckpt/5"), NodeLost("b2", "Xid79"))
    d.submit("a", 3)
    told = explain(d.state, "default/a", d.now)
    assert (told.verdict, told.position) == ("cannot", 1)
    assert told.summary == "cannot start now: 3 of 3 nodes missing (0 free: 0 in A, 0 in B)"
    by_job = {blocker.job: blocker for blocker in told.blockers if blocker.job}
    assert by_job["default/busy"].user == "anna"
    assert by_job["default/busy"].message == "default/busy of anna has 3 at priority normal"
    assert by_job["default/big"].since is not None
    assert [blocker.node for blocker in told.blockers if blocker.node] == ["b2"]
    # busy has just saved: its restart alone is lost. With b2 back, big would do, at its price.
    assert told.remedies[0].command == "flyer suspend default/busy"
    assert told.remedies[0].cost_node_seconds == 3 * 60
    assert (told.remedies[-1].command, told.remedies[-1].node) == ("", "b2")


def test_explain_says_who_preempted_whom(desk: Callable) -> None:
    d = desk()
    d.run("a", 6)
    d.wait(10)
    d.submit("b", 6, priority="high")
    told = explain(d.state, "default/b", d.now)
    assert (told.verdict, told.blockers[0].job) == ("can", "default/a")
    assert told.blockers[0].until == d.now + 10
    d.tell(Released("default/a", 1))
    d.empty("a")
    told = explain(d.state, "default/a", d.now)
    assert (told.verdict, told.preempted_by) == ("cannot", "default/b")


def test_explain_changes_nothing(desk: Callable) -> None:
    d = desk()
    d.run("a", 6)
    d.submit("b", 6)
    before = d.state
    explain(d.state, "default/b", d.now + 1000)
    assert d.state == before


def test_explain_of_an_unknown_job_says_so(desk: Callable) -> None:
    with pytest.raises(UnknownJob, match="default/nobody is not known here"):
        explain(desk().state, "default/nobody", 0.0)

"""Stored statuses of two jobs that reserve one node: the later reservation is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import JobRemoved, Node, Start, Stop, rebuild
from flyer.sim.histories import History

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = "default/a", "default/b"


def test_a_returned_job_starts_again_if_its_node_was_reserved_since(
    new_harness: Callable, pick: Callable
) -> None:
    harness = new_harness([Node("n0", "A"), Node("n1", "A")])
    harness.run("a", 2)
    stale = harness.jobs[A].replace(status=harness.status("a"))
    harness.step(JobRemoved(A))
    harness.empty("a")
    harness.wait(5)
    harness.run("b", 1)
    (node,) = harness.names("b")
    current = harness.jobs[B].replace(status=harness.status("b"))
    # The object of `a` comes back as it was while no scheduler runs.
    harness.state = rebuild(harness.nodes, (stale, current), harness.now, 2, harness.settings)
    actions = harness.step()
    assert harness.status("b") == current.status
    assert harness.status("a").phase is Phase.QUEUED
    assert harness.status("a").eviction.reason == "ObjectVanished"
    assert [item.name for item in harness.status("a").occupied] == [{"n0": "n1", "n1": "n0"}[node]]
    assert not pick(actions, Start)
    assert [stop.job for stop in pick(actions, Stop)] == [A]


def test_the_history_in_which_a_job_returned_before_a_restart() -> None:
    History(13550479302457).run()

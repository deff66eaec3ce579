"""Pending status: its size, and the rate of its writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import Commit, NodeLost, NodeObserved, explain
from flyer.sim import two_zones

if TYPE_CHECKING:
    from collections.abc import Callable


def churned(new_harness: Callable, jobs: int, seconds: int) -> tuple[int, int]:
    """Writes of a queue in which every step changes every job's reasons, and its largest status."""
    harness = new_harness(two_zones(20))
    for index in range(40):
        harness.submit(f"runs{index}")
    for index in range(jobs):  # no two alike, so that none is just behind another
        harness.submit(f"waits{index}", 2, activeDeadline=f"{index + 1}m")
    before = len(harness.steps)
    for second in range(seconds):
        harness.now += 1
        node = harness.nodes[second // 2 % len(harness.nodes)]
        harness.step(NodeObserved(node) if second % 2 else NodeLost(node.name, "PowerLost"))
    commits = [
        action
        for _, _, actions in harness.steps[before:]
        for action in actions
        if isinstance(action, Commit) and action.status.phase is Phase.QUEUED
        and action.job.startswith("default/waits")
    ]  # fmt: skip
    assert all(harness.status(f"waits{index}").phase is Phase.QUEUED for index in range(jobs))
    return len(commits), max(len(json.dumps(commit.status.to_object())) for commit in commits)


def test_writes_do_not_grow_with_the_queue(new_harness: Callable) -> None:
    few, _ = churned(new_harness, 20, 120)
    many, size = churned(new_harness, 200, 120)
    # Every 30 s at the front; the 100th place every 100 s.
    assert few <= 20 * (120 // 30 + 1)
    assert many <= few + 200 + 50
    assert size < 16_000


def test_a_burst_of_changed_reasons_is_spread(new_harness: Callable) -> None:
    harness = new_harness(pending_writes_burst=10, pending_writes_per_second=2.0)
    for index in range(60):
        harness.submit(f"a{index}", 9, activeDeadline=f"{index + 1}m")
    assert harness.status("a59").pending.verdict == "Never"  # the first verdict is never put off
    more = two_zones(9)
    harness.now += 1000
    commits = [action for action in harness.step(*(NodeObserved(node) for node in more))
               if isinstance(action, Commit) and action.status.phase is Phase.QUEUED]  # fmt: skip
    assert len(commits) <= 10
    for _ in range(200):
        harness.wait(1.0)
    assert all(harness.status(f"a{index}").pending.verdict == "Pending" for index in range(60)
               if harness.status(f"a{index}").phase is Phase.QUEUED)  # fmt: skip


def test_a_status_lists_some_reasons_and_counts_the_others(new_harness: Callable) -> None:
    harness = new_harness(two_zones(40))
    for index in range(60):
        harness.submit(f"runs{index}")
    harness.submit("waits", 80)
    harness.step(*(NodeLost(f"b{index}", "PowerLost") for index in range(30, 40)))
    harness.wait(40)
    pending = harness.status("waits").pending
    explanation = explain(harness.state, "default/waits", harness.now)
    assert [reason.message for reason in pending.reasons[:5]] == [
        blocker.message for blocker in explanation.blockers[:5]
    ]
    assert len(pending.reasons) + pending.more == len(explanation.blockers)
    assert (len(pending.reasons), len(pending.blocked_by)) == (8, 32)
    assert sum(bool(reason.node) for reason in pending.reasons) == 3
    assert len(pending.unblock) <= 4


def test_changed_numbers_are_written_after_a_pause(new_harness: Callable) -> None:
    harness = new_harness()
    harness.submit("runs", 4)
    harness.submit("waits", 6)
    first = harness.status("waits").pending
    assert (first.position, first.time) == (1, harness.now)
    harness.wait(1)
    harness.step(
        NodeLost(
            next(node.name for node in harness.nodes if node.name not in harness.names("runs")),
            "Power",
        )
    )
    assert harness.status("waits").pending is first
    harness.wait(30)
    assert harness.status("waits").pending.time == harness.now
    assert "is out: Power" in harness.status("waits").pending.message

"""Why jobs wait: how much of it a status holds, and how often it is written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import Commit, NodeLost, NodeObserved, explain
from flyer.sim import two_zones

if TYPE_CHECKING:
    from collections.abc import Callable


def churned(desk: Callable, jobs: int, seconds: int) -> tuple[int, int]:
    """Writes of a queue in which every step changes every job's reasons, and its largest status."""
    d = desk(two_zones(20))
    for index in range(40):
        d.submit(f"runs{index}")
    for index in range(jobs):  # no two alike, so that none is just behind another
        d.submit(f"waits{index}", 2, activeDeadline=f"{index + 1}m")
    before = len(d.steps)
    for second in range(seconds):
        d.now += 1
        node = d.nodes[second // 2 % len(d.nodes)]
        d.tell(NodeObserved(node) if second % 2 else NodeLost(node.name, "PowerLost"))
    commits = [
        action
        for _, _, actions in d.steps[before:]
        for action in actions
        if isinstance(action, Commit) and action.status.phase is Phase.QUEUED
        and action.job.startswith("default/waits")
    ]  # fmt: skip
    assert all(d.status(f"waits{index}").phase is Phase.QUEUED for index in range(jobs))
    return len(commits), max(len(json.dumps(commit.status.to_object())) for commit in commits)


def test_writes_do_not_grow_with_the_queue(desk: Callable) -> None:
    few, _ = churned(desk, 20, 120)
    many, size = churned(desk, 200, 120)
    # Every 30 s at the front; the 100th place every 100 s.
    assert few <= 20 * (120 // 30 + 1)
    assert many <= few + 200 + 50
    assert size < 16_000


def test_a_burst_of_changed_reasons_is_spread(desk: Callable) -> None:
    d = desk(pending_writes_burst=10, pending_writes_per_second=2.0)
    for index in range(60):
        d.submit(f"a{index}", 9, activeDeadline=f"{index + 1}m")
    assert d.status("a59").pending.verdict == "Never"  # the first verdict is never put off
    more = two_zones(9)
    d.now += 1000
    written = [one for one in d.tell(*(NodeObserved(node) for node in more))
               if isinstance(one, Commit) and one.status.phase is Phase.QUEUED]  # fmt: skip
    assert len(written) <= 10
    for _ in range(200):
        d.wait(1.0)
    assert all(d.status(f"a{index}").pending.verdict == "Pending" for index in range(60)
               if d.status(f"a{index}").phase is Phase.QUEUED)  # fmt: skip


def test_a_status_lists_some_reasons_and_counts_the_others(desk: Callable) -> None:
    d = desk(two_zones(40))
    for index in range(60):
        d.submit(f"runs{index}")
    d.submit("waits", 80)
    d.tell(*(NodeLost(f"b{index}", "PowerLost") for index in range(30, 40)))
    d.wait(40)
    pending = d.status("waits").pending
    told = explain(d.state, "default/waits", d.now)
    assert [reason.message for reason in pending.reasons[:5]] == [
        blocker.message for blocker in told.blockers[:5]
    ]
    assert len(pending.reasons) + pending.more == len(told.blockers)
    assert (len(pending.reasons), len(pending.blocked_by)) == (8, 32)
    assert sum(bool(reason.node) for reason in pending.reasons) == 3
    assert len(pending.unblock) <= 4


def test_changed_numbers_are_written_after_a_pause(desk: Callable) -> None:
    d = desk()
    d.submit("runs", 4)
    d.submit("waits", 6)
    first = d.status("waits").pending
    assert (first.position, first.time) == (1, d.now)
    d.wait(1)
    d.tell(
        NodeLost(next(node.name for node in d.nodes if node.name not in d.names("runs")), "Power")
    )
    assert d.status("waits").pending is first
    d.wait(30)
    assert d.status("waits").pending.time == d.now
    assert "is out: Power" in d.status("waits").pending.message

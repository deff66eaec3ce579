"""What is told about a commit, and that a burst of waiting jobs does not cost as many writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from flyer.api import FlyerJobStatus, Phase
from flyer.api.status import Pending
from flyer.api.waiting import PENDING_REASONS, WAITING_REASONS
from flyer.kube.client import LeaseSettings
from flyer.kube.services import announcements
from flyer.kube.services.announcements import REASONS, Announcement, Announcer, announcement

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)
PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "scheduling.md"


def queued(reason: str, message: str = "2 of 4 nodes missing", **more: str) -> FlyerJobStatus:
    pending = Pending.model_validate({"reason": reason, "message": message, **more})
    return FlyerJobStatus(phase=Phase.QUEUED, pending=pending)


def test_a_job_tells_once_what_it_waits_for_with_the_numbers() -> None:
    told = announcement(queued("PendingEvaluation"), queued("WaitingForNodes"))
    assert told == Announcement("WaitingForNodes", "2 of 4 nodes missing")
    assert announcement(None, queued("WaitingForZone")) is not None
    assert announcement(None, queued("PendingEvaluation")) is None
    assert announcement(queued("WaitingForNodes"), queued("WaitingForTurn")) is None
    never = announcement(None, queued("NoMatchingFlavor", verdict="Never"))
    assert never is not None
    assert (never.reason, never.warning) == ("NeverFits", True)


def test_a_burst_of_waiting_jobs_is_told_in_part_and_all_else_whole() -> None:
    announcer = Announcer(None, "a")  # type: ignore[arg-type] - nothing is posted here
    for number in range(500):
        announcer.tell(f"ns/job-{number}", f"uid-{number}", Announcement("WaitingForNodes", "text"))
    waiting = announcer._queue.qsize()
    assert announcements.WAITING_AT_ONCE <= waiting < 200
    announcer.tell("ns/job", "uid", Announcement("Started", "text"))
    assert announcer._queue.qsize() == waiting + 1


def ended(phase: Phase, reason: str, message: str) -> FlyerJobStatus:
    return FlyerJobStatus(phase=phase, reason=reason, message=message)


def evicted(reason: str, message: str, **more: object) -> FlyerJobStatus:
    eviction = {"reason": reason, "message": message, "time": 5.0, "attempt": 1, **more}
    pending = {"reason": "PendingEvaluation", "message": "not looked at yet"}
    value = {"phase": "Queued", "eviction": eviction, "pending": pending}
    return FlyerJobStatus.model_validate(value)


RUNNING = FlyerJobStatus.model_validate(
    {
        "phase": "Running", "zones": "A+B", "chain": {"id": "c", "attempt": 2},
        "assignment": {
            "epoch": 1, "reservedAt": 1.0, "bridge": ["a0", "b0"],
            "nodes": [
                {"name": "a0", "zone": "A", "firstRank": 0},
                {"name": "b0", "zone": "B", "firstRank": 1},
            ],
        },
        "checkpoint": {"step": 7, "path": "/c", "durable": True, "time": 4.0},
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (RUNNING, Announcement("Started", "attempt 2 runs on 2 nodes, zone A+B, from step 7")),
        (ended(Phase.SUCCEEDED, "Complete", "done"), Announcement("Completed", "done")),
        (
            ended(Phase.FAILED, "RankFailed", "a rank on node a0 exited with status 3"),
            Announcement("Failed", "RankFailed: a rank on node a0 exited with status 3", True),
        ),
        (
            evicted("Preempted", "preempted by ml/b", lostSteps=4),
            Announcement("Preempted", "preempted by ml/b; 4 steps are to be done again"),
        ),
        (evicted("Suspended", "by anna"), Announcement("Suspended", "by anna")),
        (evicted("Requeued", "by anna"), Announcement("Requeued", "by anna")),
        (evicted("Yielded", "it gave them back"), Announcement("Requeued", "it gave them back")),
        (evicted("NodeFailures", "lost a0"), Announcement("Restarted", "lost a0", True)),
        (evicted("PodsRefused", "it is full"), Announcement("PodsRefused", "it is full", True)),
    ],
    ids=lambda one: one.reason if isinstance(one, Announcement) else "",
)  # fmt: skip
def test_the_most_important_thing_of_a_commit_is_told(
    after: FlyerJobStatus, told: Announcement
) -> None:
    assert announcement(None, after) == told
    assert announcement(after, after) is None


async def test_an_object_that_cannot_be_read_is_told_of_once(cluster: Any, until: Any) -> None:
    """A server refuses it, but may have taken it under an earlier definition."""
    cluster.nodes("A")
    cluster.operator(LEASE)  # the next leader says it again
    with cluster.store.unchecked():
        cluster.submit("odd", 1, watchdog="soon")
    cluster.submit("a", 1)

    def told() -> list[Any]:
        return [one for one in cluster.store.all("events") if one["reason"] == "InvalidJob"]

    await until(told)
    cluster.edit("odd", queue="other")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    [event] = told()
    assert event["involvedObject"]["name"] == "odd"
    assert event["type"] == "Warning"
    assert "spec.watchdog" in event["message"]


def test_the_page_has_every_reason() -> None:
    text = PAGE.read_text()
    rows = set(re.findall(r"^\| (\w+) \|", text, re.MULTILINE))
    assert set(REASONS) <= rows
    never = {
        "ExceedsMaxQuota", "NoMatchingFlavor", "TopologyPlacementFailed", "QuotaExceeded",
        "TemplateRefused",
    }  # fmt: skip
    assert set(PENDING_REASONS) - rows == never
    assert [one for one in never if one not in text] == []
    assert set(WAITING_REASONS) <= set(REASONS)

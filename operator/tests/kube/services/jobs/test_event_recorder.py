"""Kubernetes Events of jobs: a burst of waiting jobs costs few writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flyer.api import Phase
from flyer.api.waiting import PENDING_REASONS, WAITING_REASONS
from flyer.job_events import RECORDED_REASONS, JobEvent
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.services.jobs import event_recorder
from flyer.kube.services.jobs.event_recorder import EventRecorder

LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
)
PAGE = Path(__file__).parents[5] / "docs" / "concepts" / "scheduling.md"


def test_events_of_waiting_jobs_are_sampled_and_others_are_complete() -> None:
    recorder = EventRecorder(None, "a")  # type: ignore[arg-type] - nothing is posted here
    for number in range(500):
        recorder.record(f"ns/job-{number}", f"uid-{number}", JobEvent("WaitingForNodes", "text"))
    waiting = recorder._queue.qsize()
    assert event_recorder.WAITING_EVENTS_BURST <= waiting < 200
    recorder.record("ns/job", "uid", JobEvent("Started", "text"))
    assert recorder._queue.qsize() == waiting + 1


async def test_an_unreadable_object_is_reported_once(cluster: Any, until: Any) -> None:
    """The server refuses it now, but may have stored it under an earlier definition."""
    cluster.nodes("A")
    cluster.operator(LEASE)  # the next leader reports it again
    with cluster.store.unchecked():
        cluster.submit("odd", 1, progressDeadline="soon")
    cluster.submit("a", 1)

    def reported() -> list[Any]:
        return [event for event in cluster.store.all("events") if event["reason"] == "InvalidJob"]

    await until(reported)
    cluster.edit("odd", queue="other")
    await until(lambda: cluster.phase("a") is Phase.RUNNING)
    [event] = reported()
    assert event["involvedObject"]["name"] == "odd"
    assert event["type"] == "Warning"
    assert "spec.progressDeadline" in event["message"]


def test_the_page_has_every_reason() -> None:
    text = PAGE.read_text()
    rows = set(re.findall(r"^\| (\w+) \|", text, re.MULTILINE))
    assert set(RECORDED_REASONS) <= rows
    never = {
        "InsufficientNodes", "InsufficientSlots", "NoMatchingNodeClass", "NoMatchingZone",
        "TopologyPlacementFailed", "QuotaExceeded", "TemplateRefused",
    }  # fmt: skip
    assert set(PENDING_REASONS) - rows == never
    assert [item for item in never if item not in text] == []
    assert set(WAITING_REASONS) <= set(RECORDED_REASONS)

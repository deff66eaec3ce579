"""Writes of Events: for a single one, and for a series of repeated ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from flyer.client.kubernetes.views import event_view
from flyer.job_events import JobEvent
from flyer.kube.services.jobs import event_series
from flyer.kube.services.jobs.event_recorder import EventRecorder
from flyer.kube.services.jobs.event_series import SERIES_MAX, SERIES_SECONDS, EventSeries

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakekube import ApiServer

DROPPED = JobEvent("EventDropped", "the scheduler failed at it", warning=True)
NOW = 1_790_000_000.25


def test_an_event_names_reporter_reason_and_job() -> None:
    write = EventSeries("flyer-operator-7").record("lab/gpt", "uid-1", DROPPED, NOW)
    assert write is not None
    assert not write.repeats
    assert write.body == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": write.name, "namespace": "lab"},
        "regarding": {
            "apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob", "namespace": "lab",
            "name": "gpt", "uid": "uid-1",
        },
        "type": "Warning",
        "reason": "EventDropped",
        "note": "the scheduler failed at it",
        "action": "Schedule",
        "eventTime": "2026-09-21T14:13:20.250000Z",
        "reportingController": "fireflyer.dev/flyer-operator",
        "reportingInstance": "flyer-operator-7",
    }  # fmt: skip
    assert write.name.startswith("gpt.")


def test_repeated_events_are_a_series_with_few_writes() -> None:
    objects = EventSeries("a")
    first = objects.record("lab/gpt", "uid-1", DROPPED, NOW)
    assert first is not None
    counts = []
    for number in range(1, 1000):
        write = objects.record("lab/gpt", "uid-1", DROPPED, NOW + number * 0.01)
        if write is not None:
            assert write.repeats
            assert (write.namespace, write.name) == ("lab", first.name)
            counts.append(write.body["series"]["count"])
    assert counts == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    # Later the latest count is written once a minute.
    late = objects.record("lab/gpt", "uid-1", DROPPED, NOW + 70)
    assert late is not None
    assert late.body == {
        "series": {"count": 1001, "lastObservedTime": "2026-09-21T14:14:30.250000Z"}
    }


def test_the_last_count_of_a_series_is_written_a_minute_later() -> None:
    objects = EventSeries("a")
    first = objects.record("lab/gpt", "uid-1", DROPPED, NOW)
    for later in (1, 2):
        objects.record("lab/gpt", "uid-1", DROPPED, NOW + later)
    assert objects.overdue(NOW + 60) == []
    [write] = objects.overdue(NOW + 61)
    assert first is not None
    assert (write.name, write.repeats) == (first.name, True)
    assert write.body == {"series": {"count": 3, "lastObservedTime": "2026-09-21T14:13:22.250000Z"}}
    assert objects.overdue(NOW + 200) == []


async def test_the_announcer_writes_the_last_count(
    api_server: ApiServer, connect: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_series, "WRITE_SECONDS", 0.2)
    recorder = EventRecorder(connect(), "flyer-operator-7")
    running = asyncio.create_task(recorder.run())
    for _ in range(3):
        recorder.record("default/gpt", "uid-1", DROPPED)

    def counts() -> list[int]:
        return [event.get("series", {}).get("count", 1) for event in api_server.store.all("events")]

    await until(lambda: counts() == [3])
    running.cancel()


@pytest.mark.parametrize(
    ("job", "uid", "event"),
    [
        ("lab/gpt", "uid-2", DROPPED),
        ("lab/gpt", "uid-1", JobEvent("EventDropped", "another", warning=True)),
        ("lab/gpt", "uid-1", JobEvent("Quarantined", DROPPED.message, warning=True)),
    ],
)
def test_another_job_reason_or_message_is_another_event(
    job: str, uid: str, event: JobEvent
) -> None:
    objects = EventSeries("a")
    first = objects.record("lab/gpt", "uid-1", DROPPED, NOW)
    other = objects.record(job, uid, event, NOW)
    assert first is not None
    assert other is not None
    assert not other.repeats
    assert first.name != other.name


def test_a_series_ends_when_nothing_repeats_for_a_while() -> None:
    objects = EventSeries("a")
    objects.record("lab/gpt", "uid-1", DROPPED, NOW)
    record = objects.record("lab/gpt", "uid-1", DROPPED, NOW + SERIES_SECONDS)
    assert record is not None
    assert record.repeats
    new = objects.record("lab/gpt", "uid-1", DROPPED, NOW + 2 * SERIES_SECONDS + 1)
    assert new is not None
    assert not new.repeats


def test_the_number_of_series_is_bounded_and_the_oldest_is_dropped() -> None:
    objects = EventSeries("a")
    for number in range(SERIES_MAX):
        objects.record("lab/gpt", f"uid-{number}", DROPPED, NOW)
    again = objects.record("lab/gpt", "uid-0", DROPPED, NOW)
    assert again is not None
    assert again.repeats
    objects.record("lab/gpt", "uid-new", DROPPED, NOW)
    assert len(objects._recorded) == SERIES_MAX
    forgotten = objects.record("lab/gpt", "uid-1", DROPPED, NOW)
    assert forgotten is not None
    assert not forgotten.repeats


def test_a_long_message_is_cut_where_the_api_server_has_its_limit() -> None:
    write = EventSeries("x" * 300).record("a/b", "u", JobEvent("Started", "x" * 5000), NOW)
    assert write is not None
    assert len(write.body["note"]) == 1024
    assert len(write.body["reportingInstance"]) == 128


async def test_a_long_message_that_is_not_ascii_is_stored(
    api_server: ApiServer, connect: Any, until: Callable[..., Any]
) -> None:
    """The limit is in bytes; a partial last character is omitted."""
    recorder = EventRecorder(connect(), "flyer-operator-7")
    running = asyncio.create_task(recorder.run())
    recorder.record("default/gpt", "uid-1", JobEvent("Failed", "x" + "é" * 1000, warning=True))
    await until(lambda: api_server.store.all("events") or not recorder._series._recorded)
    running.cancel()
    assert [event["message"] for event in api_server.store.all("events")] == ["x" + "é" * 511]


def test_series_remember_no_more_of_a_message_than_is_stored() -> None:
    objects = EventSeries("a")
    objects.record("lab/gpt", "uid-1", JobEvent("Failed", "x" * 100_000), NOW)
    [(_, _, message, _)] = objects._recorded
    assert len(message) == 1024


async def test_a_series_is_one_object_that_users_see_with_its_count(
    api_server: ApiServer, connect: Any, until: Callable[..., Any]
) -> None:
    recorder = EventRecorder(connect(), "flyer-operator-7")
    running = asyncio.create_task(recorder.run())
    for _ in range(4):
        recorder.record("default/gpt", "uid-1", DROPPED)

    def events() -> list[dict[str, Any]]:
        return api_server.store.all("events")

    await until(lambda: events() and events()[0].get("series", {}).get("count") == 4)
    [event] = events()
    assert event["reportingInstance"] == "flyer-operator-7"
    view = event_view(event)
    assert (view.job, view.reason, view.message) == ("default/gpt", DROPPED.reason, DROPPED.message)
    assert view.fields == {"count": 4}
    # The API server keeps an event for an hour; a later one is a new event.
    name = event["metadata"]["name"]
    api_server.store.delete("events", name, "default")
    for _ in range(4):  # 8 is the next count that is written
        recorder.record("default/gpt", "uid-1", DROPPED)
    await until(lambda: not recorder._series._recorded)
    recorder.record("default/gpt", "uid-1", DROPPED)
    await until(events)
    [again] = events()
    assert again["metadata"]["name"] != name
    assert "series" not in again
    running.cancel()


def test_one_of_the_core_group_is_read_as_before() -> None:
    """Events of an earlier version, or of the kubelet."""
    event = {
        "metadata": {"resourceVersion": "7", "creationTimestamp": "2026-09-21T14:00:00Z"},
        "involvedObject": {"namespace": "lab", "name": "gpt"},
        "reason": "Started", "message": "m", "count": 3, "lastTimestamp": "2026-09-21T14:13:20Z",
    }  # fmt: skip
    view = event_view(event)
    assert (view.time, view.fields) == (1_790_000_000.0, {"count": 3})
    series = {"count": 5, "lastObservedTime": "2026-09-21T14:13:21.000000Z"}
    view = event_view({**event, "eventTime": "2026-09-21T14:01:00.000000Z", "series": series})
    assert (view.time, view.fields) == (1_790_000_001.0, {"count": 5})
    assert event_series.WRITE_SECONDS < SERIES_SECONDS

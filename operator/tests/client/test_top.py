"""`flyer top`: its columns and their width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flyer.cli import screens
from flyer.views import AttemptView, CheckpointView, JobView, ProgressView, from_json

NOW = 1_000_000.0
EMPTY: dict[str, Any] = {
    "name": "gpt", "namespace": "ml", "state": "Running", "reason": "", "message": "", "nodes": 4,
    "ranksPerNode": 8, "priority": "normal", "queue": "", "nodeClass": "", "zone": "",
    "createdAt": 0.0, "historyId": "c", "attempt": 2, "restarts": 1, "suspendCode": 0,
    "suspended": False, "zones": [],
    "placement": [], "crossZonePair": [], "progress": None, "checkpoint": None, "eta": "",
    "finishedAt": None, "exitStatus": None, "failure": None, "attempts": [], "conditions": [],
    "logFolder": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens.time, "time", lambda: NOW)
    monkeypatch.setenv("NO_COLOR", "1")


def job(step: int, at: float, **metrics: float) -> JobView:
    attempts = [
        AttemptView(1, NOW - 900, NOW - 300, [], None, None, "Preempted", lost_steps=7),
        AttemptView(2, NOW - 200, None, [], 100, True, ""),
    ]
    return replace(
        from_json(JobView, EMPTY),
        progress=ProgressView(step, at, 20_000, metrics),
        checkpoint=CheckpointView(1200, NOW - 50, "/ckpt", durable=True),
        attempts=attempts,
    )


def test_speed_loss_bandwidth_and_steps_at_risk() -> None:
    row = screens.top_row(
        job(1240, NOW, loss=2.25, allreduce_gigabytes_per_second=6.5), job(1220, NOW - 4)
    )
    assert row["stepsPerSecond"] == 5
    assert (row["loss"], row["allreduceGigabytesPerSecond"]) == (2.25, 6.5)
    assert (row["unsavedSteps"], row["checkpointAgeSeconds"]) == (40, 50)
    assert row["unsavedNodeSeconds"] == 4 * 50
    assert row["lostSteps"] == 7


def test_the_exposed_share_is_in_the_wide_table_and_in_the_screen_of_the_job() -> None:
    running = job(1240, NOW, loss=2.25, exposed=0.126)
    running = replace(running, progress=replace(running.progress, exposed_percent=13))
    row = screens.top_row(running, None)
    assert row["exposedPercent"] == 13
    header, line = screens.top_table([row], wide=True).splitlines()
    assert line[header.index("EXPOSED") :].split()[0] == "13%"
    assert "1240/20000 6%  loss=2.25 exposed=13%\n" in screens.job_screen(running, [])
    hostile = job(1240, NOW, exposed=1e300)
    assert screens.top_row(hostile, None)["exposedPercent"] is None
    assert "1e+300" not in screens.job_screen(hostile, [])


def test_without_a_checkpoint_the_whole_attempt_is_at_risk() -> None:
    row = screens.top_row(replace(job(3, NOW), checkpoint=None), None)
    assert row["unsavedNodeSeconds"] == 4 * 200
    assert (row["checkpointAgeSeconds"], row["loss"], row["stepsPerSecond"]) == (None, None, None)
    bare = screens.top_row(from_json(JobView, EMPTY), None)
    assert (bare["unsavedNodeSeconds"], bare["step"]) == (None, None)
    assert screens.top_table([bare]).splitlines()[1].split() == [
        "gpt", "4", *["-"] * 7,
    ]  # fmt: skip


def test_large_numbers_fit_eighty_columns() -> None:
    large = replace(
        job(123_456_789, NOW, loss=12345.678, allreduce_gigabytes_per_second=123.456),
        name="a-name-that-is-much-longer-than-a-column-7b",
        nodes=10_000,
        checkpoint=CheckpointView(1, NOW - 400_000, "/ckpt", durable=True),
        attempts=[AttemptView(2, NOW - 500_000, None, [], 100, True, "")],
    )
    row = screens.top_row(large, replace(large, progress=ProgressView(1, NOW - 1, None, {})))
    lines = screens.top_table([row]).splitlines()
    assert max(len(line) for line in lines) <= screens.TOP_COLUMNS
    assert "…" in lines[1]
    assert lines[1].split()[0].endswith("7b")
    wide = screens.top_table([row], wide=True)
    assert "ml/a-name-that-is-much-longer-than-a-column-7b" in wide
    assert "LOST" in wide

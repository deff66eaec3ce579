"""What a decision looks at: reports plan nothing, and jobs that ran before are one class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import (
    CheckpointReported,
    Commit,
    LogObserved,
    NodeEmptied,
    ProgressReported,
    Released,
    WakeAt,
    schedule,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def _count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    calls: list[str] = []
    real = getattr(schedule, name)

    def counted(market: object, job: object, *args: object) -> object:
        calls.append(job.key)  # type: ignore[attr-defined]
        return real(market, job, *args)

    monkeypatch.setattr(schedule, name, counted)
    return calls


def test_reports_of_running_jobs_plan_nothing(
    desk: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = desk()
    d.run("runs", 3)
    d.submit("waits", 6)
    calls = _count(monkeypatch, "_place")
    d.now += 0.1
    d.tell(ProgressReported("default/runs", 1, 1), LogObserved("default/runs", 1))
    assert calls == []
    d.tell(CheckpointReported("default/runs", 1, 1, "/c"))
    assert calls == ["default/waits"]


def test_a_report_keeps_the_wake_up_and_stores_progress(desk: Callable, pick: Callable) -> None:
    d = desk()
    d.run("runs", 3, watchdog="60s")
    d.wait(0.1)
    due_at = d.state.due_at
    d.now += 6
    actions = d.tell(ProgressReported("default/runs", 1, 7))
    assert [one.status.progress.step for one in pick(actions, Commit)] == [7]
    assert pick(actions, WakeAt)[0].time <= due_at
    # The silence that follows is noticed all the same.
    for _ in range(4):
        wakes = pick(d.tell(), WakeAt)
        d.now = wakes[0].time if wakes else d.now + 60
    assert d.status("runs").chain.restarts == 1


def test_a_report_after_the_time_of_a_wake_up_plans(desk: Callable) -> None:
    d = desk()
    d.run("low", 6, priority="low")
    d.submit("high", 6, priority="high")
    assert d.status("low").phase is Phase.RUNNING  # in its minimum runtime
    d.now += 10
    d.tell(ProgressReported("default/low", 1, 1))
    assert d.status("low").phase is Phase.SUSPENDING


def test_jobs_that_ran_before_are_blocked_together(
    desk: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = desk(same_split_seconds=0.0)
    for name in ("one", "two", "three"):
        d.run(name, 2, priority="low")
    d.wait(20)
    d.submit("high", 6, priority="high")
    for name in ("one", "two", "three"):
        d.tell(Released(f"default/{name}", 1))
        d.tell(*(NodeEmptied(one.name, f"default/{name}", 1) for one in d.status(name).occupied))
    assert {d.status(name).phase for name in ("one", "two", "three")} == {Phase.QUEUED}
    calls = _count(monkeypatch, "_place")
    d.wait(1)
    assert len(calls) == 1

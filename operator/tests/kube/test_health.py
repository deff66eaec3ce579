"""Conditions under which a replica is restarted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flyer.kube import health, metrics
from flyer.kube.health import Health
from flyer.kube.metrics import Metrics


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(metrics, "time", fake_clock)
    return fake_clock


def make_health(clock: Clock, *, age: float, term: Any = None) -> tuple[Health, Metrics]:
    counted = Metrics()
    cache: Any = SimpleNamespace(age_seconds=age, synced=True, caches=())
    leader: Any = SimpleNamespace(term=term)
    return Health(cache, leader, counted, clock.monotonic), counted


def test_an_unreachable_api_server_causes_no_restart(clock: Clock) -> None:
    checked, counted = make_health(clock, age=3600.0)
    for code in (200, 0, 503, 504):
        counted.called("get", "leases", code, 0.1)
        clock.now += 600
    assert checked.unhealthy_reason() == ""
    # It is reachable again: the watches get their time to reconnect.
    counted.called("get", "leases", 200, 0.1)
    clock.now += health.WATCH_AGE_SECONDS_MAX / 2
    counted.called("get", "leases", 404, 0.1)
    assert checked.unhealthy_reason() == ""


def test_a_silent_watch_of_a_reachable_api_server_causes_a_restart(clock: Clock) -> None:
    checked, counted = make_health(clock, age=100.0)
    counted.called("get", "leases", 200, 0.1)
    clock.now += health.WATCH_AGE_SECONDS_MAX + 1
    counted.called("get", "leases", 200, 0.1)
    assert "silent for 100 s while the API server responded" in checked.unhealthy_reason()
    assert checked.pages()["/healthz"][0] == 503


def test_responses_of_watches_alone_prove_no_reachability(clock: Clock) -> None:
    health, counted = make_health(clock, age=100.0)
    counted.called("watch", "pods", 200, 0.1)
    clock.now += 1000
    assert health.unhealthy_reason() == ""


def test_a_stalled_scheduler_causes_a_restart(clock: Clock) -> None:
    term = SimpleNamespace(serving=True, ticked_at=clock.now)
    checked, _ = make_health(clock, age=0.0, term=term)
    assert checked.unhealthy_reason() == ""
    clock.now += health.TERM_AGE_SECONDS_MAX + 1
    assert "has made no progress for 121 s" in checked.unhealthy_reason()
    assert checked.pages()["/leaderz"] == (200, "ok")

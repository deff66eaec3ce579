"""A bug of the scheduler that one job triggers."""

import json

import pytest
from flyer import engine
from flyer.engine import CheckpointReported, JobFault, Tick
from flyer.local.cluster import load_cluster
from flyer.local.driver import Driver
from flyer.local.store import Store


@pytest.fixture
def driver(bench):
    store = Store.open(bench.state)
    yield Driver(load_cluster(bench.cluster()), store)
    store.close()


def failing(monkeypatch, event):
    whole = engine.step

    def step(state, events, now):
        if event in events:
            raise JobFault("default/a", event) from ZeroDivisionError("by a bug")
        return whole(state, events, now)

    monkeypatch.setattr(engine, "step", step)


def test_an_event_that_the_engine_fails_on_is_dropped_and_reported(driver, monkeypatch):
    bad, good = (CheckpointReported("default/a", 1, step, "/c") for step in (7, 8))
    failing(monkeypatch, bad)
    driver.advance([bad, Tick(), good])
    (event,) = [item for item in driver.events.since(0) if item.reason == "EventDropped"]
    assert event.job == "default/a"
    assert "by a bug" in event.message
    line = driver.store.paths.decisions.read_text().splitlines()[-1]
    assert len(json.loads(line)["events"]) == 2  # a replay takes the same path

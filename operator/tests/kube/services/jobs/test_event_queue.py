"""The event queue: a leaving job costs one commit, and other jobs do not wait for it."""

import asyncio
from types import SimpleNamespace

import pytest
from flyer.api import FlyerJob
from flyer.engine import (
    CheckpointReported,
    JobRemoved,
    JobSubmitted,
    NodeEmptied,
    PodExited,
    Released,
    Succeeded,
    SuspendReceived,
    Tick,
)
from flyer.kube.services.jobs import event_queue as module
from flyer.kube.services.jobs.event_queue import EventQueue, Leaving

RECEIVED, RELEASED = SuspendReceived("d/a", 1), Released("d/a", 1)
SAVED = CheckpointReported("d/a", 1, 5, "/p", durable=True)
X, Y = NodeEmptied("x", "d/a", 1), NodeEmptied("y", "d/a", 1)
OUT = PodExited("d/a", 1, "x", Succeeded())


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.02)
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.5)


def inbox(seconds_left=60.0, nodes=("x", "y")):
    leaves = {"d/a": Leaving(frozenset(nodes), seconds_left)}
    return EventQueue(leaves.get)


async def due(queue):
    """The next due events, and the waiting time."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    await queue.wait(5.0)
    return queue.take(), loop.time() - started_at


async def test_the_exit_events_of_a_job_are_delivered_together():
    queue = inbox()
    for event in (RECEIVED, RELEASED, OUT, X):
        queue.add(event)
    queue.add(Tick())
    assert (await due(queue))[0] == [Tick()]
    queue.add(X)  # repeated: no change
    queue.add(Y)
    events, _ = await due(queue)
    assert events == [RECEIVED, RELEASED, OUT, X, Y]


async def test_the_wait_for_exit_events_is_bounded():
    queue = inbox()
    queue.add(RELEASED)
    queue.add(X)
    events, seconds = await due(queue)
    assert events == [RELEASED, X]
    assert seconds >= 0.49
    queue.add(Y)
    queue.add(X)
    assert set((await due(queue))[0]) == {X, Y}


async def test_a_release_is_delivered_before_the_deadline(monkeypatch):
    monkeypatch.setattr(module, "LEAVE_SECONDS", 60.0)
    queue = inbox(seconds_left=0.1)
    queue.add(RELEASED)
    events, seconds = await due(queue)
    assert events == [RELEASED]
    assert seconds < 30


async def test_checkpoint_reports_are_not_held():
    queue = inbox()
    queue.add(RECEIVED)
    queue.add(SAVED)
    queue.add(RELEASED)
    assert (await due(queue))[0] == [SAVED]
    assert queue.take_all() == [RECEIVED, RELEASED]


async def test_events_of_jobs_that_are_not_leaving_are_not_held():
    queue = EventQueue(lambda _job: None)
    queue.add(RELEASED)
    queue.add(X)
    assert (await due(queue))[0] == [RELEASED, X]


def submitted(name, namespace="d", **spec):
    metadata = {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}"}
    template = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}}
    spec = {"nodes": 1, "template": template, **spec}
    return JobSubmitted(FlyerJob.model_validate({"metadata": metadata, "spec": spec}))


async def test_submissions_are_taken_in_small_batches_round_robin_by_namespace(monkeypatch):
    queue = EventQueue(lambda _job: None)
    flood = [submitted(f"j{number}", "flood") for number in range(module.SUBMITTED_MAX * 3)]
    for event in flood:
        queue.add(event)
    other = submitted("a", "quiet")
    queue.add(other)
    queue.add(RELEASED)
    first, seconds = await due(queue)
    assert other in first
    assert RELEASED in first
    assert len(first) == module.SUBMITTED_MAX + 1
    assert first[:2] == [RELEASED, flood[0]]
    rest = []
    while len(rest) < 2 * module.SUBMITTED_MAX + 1:
        events, seconds = await due(queue)
        assert 0 < len(events) <= module.SUBMITTED_MAX
        assert seconds < 1
        rest += events
    assert [item for item in [*first, *rest] if item in flood] == flood


async def test_a_removal_follows_the_submission_of_its_job():
    queue = EventQueue(lambda _job: None)
    flood = [submitted(f"j{number}") for number in range(module.SUBMITTED_MAX + 1)]
    for event in flood:
        queue.add(event)
    removed = JobRemoved(flood[-1].job.key)
    queue.add(removed)
    queue.add(JobRemoved("d/running"))
    first, _ = await due(queue)
    assert removed not in first
    assert first[0] == JobRemoved("d/running")
    assert (await due(queue))[0] == [flood[-1], removed]


async def test_a_job_submitted_again_follows_the_removal_of_its_predecessor():
    queue = EventQueue(lambda _job: None)
    again = submitted("a")
    queue.add(JobRemoved("d/a"))
    queue.add(again)
    assert (await due(queue))[0] == [JobRemoved("d/a"), again]


async def test_concurrent_edits_are_one_submission():
    queue = EventQueue(lambda _job: None)
    once, twice = submitted("a", suspend=True), submitted("a", suspend=False)
    queue.add(once)
    queue.add(twice)
    assert (await due(queue))[0] == [twice]


async def test_a_rebuild_takes_every_submission():
    queue = EventQueue(lambda _job: None)
    flood = [submitted(f"j{number}") for number in range(module.SUBMITTED_MAX * 2)]
    for event in flood:
        queue.add(event)
    assert queue.take_all() == flood
    assert queue.take_all() == []


@pytest.fixture
def clock(monkeypatch):
    """The loop's time, set by the test."""
    loop_time = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(
        asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: loop_time.now)
    )
    return loop_time


def test_new_jobs_of_a_namespace_are_gathered_for_five_steps(clock):
    queue = EventQueue(lambda _job: None, lambda job: job == "flood/runs")
    first, *flood = [submitted(f"j{number}", "flood") for number in range(9)]
    queue.add(first)
    assert queue.due_seconds == 0.0
    assert queue.take() == [first]
    queue.record_step(0.01)
    queue.add(flood[0])
    assert queue.take() == [flood[0]]
    queue.record_step(0.01)
    for event in flood[1:4]:
        queue.add(event)
    assert 0.04 < queue.due_seconds <= 0.05
    # Other events, and edits of known jobs, are taken immediately.
    other, wish = submitted("a", "quiet"), submitted("runs", "flood", suspend=True)
    queue.add(other)
    queue.add(wish)
    queue.add(RELEASED)
    assert queue.due_seconds == 0.0
    assert queue.take() == [RELEASED, wish, other]
    clock.now += 0.051
    assert queue.due_seconds == 0.0
    assert queue.take() == flood[1:4]


def test_new_jobs_are_not_gathered_for_long(clock):
    queue = EventQueue(lambda _job: None)
    for number in range(2):
        queue.add(submitted(f"j{number}", "flood"))
        queue.take()
        queue.record_step(60.0)
    queue.add(submitted("late", "flood"))
    assert 0 < queue.due_seconds < module.SUBMITTED_SECONDS_MAX + 1e-6
    queue.record_step(60.0)
    queue.add(Tick())
    assert queue.take() == [Tick()]
    queue.record_step(0.0)  # the step had no new jobs
    assert 0 < queue.due_seconds < module.SUBMITTED_SECONDS_MAX + 1e-6


def test_edits_of_one_namespace_are_limited_per_step(clock):
    queue = EventQueue(lambda _job: None, lambda _job: True)
    flood = [submitted(f"j{number}", "flood", suspend=True) for number in range(100)]
    for event in flood:
        queue.add(event)
    wish = submitted("a", "quiet", suspend=True)
    queue.add(wish)
    first = queue.take()
    assert wish in first
    assert len(first) == module.EDITED_EACH + 1
    taken_events = [item for item in first if item is not wish]
    while queue.due_seconds == 0.0:
        events = queue.take()
        assert len(events) <= module.EDITED_EACH
        taken_events += events
    assert taken_events == flood

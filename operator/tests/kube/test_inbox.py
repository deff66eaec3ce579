"""What is told together: a job that leaves costs one commit, others wait for nobody."""

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
from flyer.kube.services import inbox as module
from flyer.kube.services.inbox import Inbox, Leaving

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
    return Inbox(leaves.get)


async def due(box):
    """What is due next, and how long that took."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await box.wait(5.0)
    return box.take(), loop.time() - begun


async def test_a_job_leaves_in_one_piece():
    box = inbox()
    for event in (RECEIVED, RELEASED, OUT, X):
        box.tell(event)
    box.tell(Tick())
    assert (await due(box))[0] == [Tick()]
    box.tell(X)  # said again: no news
    box.tell(Y)
    events, _ = await due(box)
    assert events == [RECEIVED, RELEASED, OUT, X, Y]


async def test_it_is_not_waited_for_forever():
    box = inbox()
    box.tell(RELEASED)
    box.tell(X)
    events, seconds = await due(box)
    assert events == [RELEASED, X]
    assert seconds >= 0.49
    box.tell(Y)
    box.tell(X)
    assert set((await due(box))[0]) == {X, Y}


async def test_a_release_is_told_before_the_deadline(monkeypatch):
    monkeypatch.setattr(module, "LEAVE_SECONDS", 60.0)
    box = inbox(seconds_left=0.1)
    box.tell(RELEASED)
    events, seconds = await due(box)
    assert events == [RELEASED]
    assert seconds < 30


async def test_what_was_saved_does_not_wait():
    box = inbox()
    box.tell(RECEIVED)
    box.tell(SAVED)
    box.tell(RELEASED)
    assert (await due(box))[0] == [SAVED]
    assert box.take_all() == [RECEIVED, RELEASED]


async def test_who_is_not_asked_to_leave_is_not_held():
    box = Inbox(lambda _job: None)
    box.tell(RELEASED)
    box.tell(X)
    assert (await due(box))[0] == [RELEASED, X]


def submitted(name, namespace="d", **spec):
    metadata = {"name": name, "namespace": namespace, "uid": f"{namespace}-{name}"}
    template = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}}
    spec = {"nodes": 1, "template": template, **spec}
    return JobSubmitted(FlyerJob.model_validate({"metadata": metadata, "spec": spec}))


async def test_submissions_are_taken_a_few_at_a_time_in_turn_by_namespace(monkeypatch):
    box = Inbox(lambda _job: None)
    flood = [submitted(f"j{number}", "flood") for number in range(module.SUBMITTED_MAX * 3)]
    for event in flood:
        box.tell(event)
    other = submitted("a", "quiet")
    box.tell(other)
    box.tell(RELEASED)
    first, seconds = await due(box)
    assert other in first
    assert RELEASED in first
    assert len(first) == module.SUBMITTED_MAX + 1
    assert first[:2] == [RELEASED, flood[0]]
    rest = []
    while len(rest) < 2 * module.SUBMITTED_MAX + 1:
        events, seconds = await due(box)
        assert 0 < len(events) <= module.SUBMITTED_MAX
        assert seconds < 1
        rest += events
    assert [one for one in [*first, *rest] if one in flood] == flood


async def test_a_removal_follows_the_submission_of_its_job():
    box = Inbox(lambda _job: None)
    flood = [submitted(f"j{number}") for number in range(module.SUBMITTED_MAX + 1)]
    for event in flood:
        box.tell(event)
    removed = JobRemoved(flood[-1].job.key)
    box.tell(removed)
    box.tell(JobRemoved("d/running"))
    first, _ = await due(box)
    assert removed not in first
    assert first[0] == JobRemoved("d/running")
    assert (await due(box))[0] == [flood[-1], removed]


async def test_a_job_submitted_again_follows_the_removal_of_the_one_before():
    box = Inbox(lambda _job: None)
    again = submitted("a")
    box.tell(JobRemoved("d/a"))
    box.tell(again)
    assert (await due(box))[0] == [JobRemoved("d/a"), again]


async def test_edits_that_come_together_are_one_submission():
    box = Inbox(lambda _job: None)
    once, twice = submitted("a", suspend=True), submitted("a", suspend=False)
    box.tell(once)
    box.tell(twice)
    assert (await due(box))[0] == [twice]


async def test_a_rebuild_takes_every_submission():
    box = Inbox(lambda _job: None)
    flood = [submitted(f"j{number}") for number in range(module.SUBMITTED_MAX * 2)]
    for event in flood:
        box.tell(event)
    assert box.take_all() == flood
    assert box.take_all() == []


@pytest.fixture
def clock(monkeypatch):
    """The loop's time, set by the test. Nothing is awaited."""
    held = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: held.now))
    return held


def test_new_jobs_of_a_namespace_are_gathered_for_five_steps(clock):
    box = Inbox(lambda _job: None, lambda job: job == "flood/runs")
    first, *flood = [submitted(f"j{number}", "flood") for number in range(9)]
    box.tell(first)
    assert box.due_seconds == 0.0
    assert box.take() == [first]
    box.stepped(0.01)
    box.tell(flood[0])
    assert box.take() == [flood[0]]
    box.stepped(0.01)
    for event in flood[1:4]:
        box.tell(event)
    assert 0.04 < box.due_seconds <= 0.05
    # Others, and wishes about jobs that the engine has, are taken at once.
    other, wish = submitted("a", "quiet"), submitted("runs", "flood", suspend=True)
    box.tell(other)
    box.tell(wish)
    box.tell(RELEASED)
    assert box.due_seconds == 0.0
    assert box.take() == [RELEASED, wish, other]
    clock.now += 0.051
    assert box.due_seconds == 0.0
    assert box.take() == flood[1:4]


def test_new_jobs_are_not_gathered_for_long(clock):
    box = Inbox(lambda _job: None)
    for number in range(2):
        box.tell(submitted(f"j{number}", "flood"))
        box.take()
        box.stepped(60.0)
    box.tell(submitted("late", "flood"))
    assert 0 < box.due_seconds < module.SUBMITTED_SECONDS_MAX + 1e-6
    box.stepped(60.0)
    box.tell(Tick())
    assert box.take() == [Tick()]
    box.stepped(0.0)  # no step with new jobs
    assert 0 < box.due_seconds < module.SUBMITTED_SECONDS_MAX + 1e-6


def test_the_wishes_of_one_namespace_leave_steps_short(clock):
    box = Inbox(lambda _job: None, lambda _job: True)
    flood = [submitted(f"j{number}", "flood", suspend=True) for number in range(100)]
    for event in flood:
        box.tell(event)
    wish = submitted("a", "quiet", suspend=True)
    box.tell(wish)
    first = box.take()
    assert wish in first
    assert len(first) == module.EDITED_EACH + 1
    found = [one for one in first if one is not wish]
    while box.due_seconds == 0.0:
        taken = box.take()
        assert len(taken) <= module.EDITED_EACH
        found += taken
    assert found == flood

"""A job is deleted and another one created with its name: events of one never concern the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import Phase
from flyer.engine import (
    CheckpointReported,
    Event,
    Failed,
    Finish,
    GangStarted,
    JobRemoved,
    JobSubmitted,
    NodeEmptied,
    PodExited,
    Released,
    RequeueRequested,
    Start,
    StartFailed,
    StartRefused,
    Stop,
    UserStateSet,
)
from flyer.sim import sample_job

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "default/a"


def submission(uid: str, **spec: Any) -> JobSubmitted:
    job = sample_job("a", **spec)
    return JobSubmitted(job.replace(metadata=job.metadata.replace(uid=uid)))


@pytest.mark.parametrize(
    "event",
    [
        JobRemoved(KEY, uid="old"),
        PodExited(KEY, 1, "a0", Failed(1, "boom"), uid="old"),
        NodeEmptied("a0", KEY, 1, uid="old"),
        StartFailed(KEY, 1, "no image", job_fault=True, uid="old"),
        StartRefused(KEY, 1, "a quota is full", uid="old"),
        GangStarted(KEY, 1, uid="old"),
        Released(KEY, 1, uid="old"),
        RequeueRequested(KEY, 1, uid="old"),
        CheckpointReported(KEY, 1, 9, "/old", uid="old"),
        UserStateSet(KEY, 1, 7, uid="old"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_of_the_earlier_object_changes_nothing(
    new_harness: Callable[..., Any], event: Event
) -> None:
    harness = new_harness()
    harness.step(submission("new"))
    before = harness.state.jobs[KEY]
    assert before.status.phase is Phase.STARTING
    harness.step(event)
    assert harness.state.jobs[KEY] == before


def test_actions_name_the_object(new_harness: Callable[..., Any], pick: Callable[..., Any]) -> None:
    harness = new_harness()
    actions = list(harness.step(submission("new")))
    actions += harness.step(JobRemoved(KEY, uid="new"))
    names = harness.names("a")
    actions += harness.step(NodeEmptied(names[0], KEY, 1, uid="new"))
    assert {type(action) for action in pick(actions, Start, Stop, Finish)} == {Start, Stop, Finish}
    assert {action.uid for action in actions if hasattr(action, "uid")} == {"new"}
    assert KEY not in harness.state.jobs


def test_a_new_object_never_takes_over_the_gang_of_a_known_one(
    new_harness: Callable[..., Any],
) -> None:
    harness = new_harness()
    harness.step(submission("old"))
    harness.step(GangStarted(KEY, 1, uid="old"))
    harness.step(submission("new", priority="high", suspend=True))
    job = harness.state.jobs[KEY]
    assert (job.uid, job.status.phase, job.suspend) == ("old", Phase.RUNNING, False)
    harness.step(JobRemoved(KEY, uid="old"))
    harness.step(NodeEmptied(harness.names("a")[0], KEY, 1, uid="old"))
    harness.step(submission("new"))
    assert harness.state.jobs[KEY].uid == "new"

"""Statuses become events and events become history, without a driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flyer.api import (
    AssignedNode,
    Assignment,
    Chain,
    Checkpoint,
    Eviction,
    Exit,
    FlyerJobStatus,
    OccupiedNode,
    Phase,
    SuspendCode,
    Suspension,
)
from flyer.attempt_history import History
from flyer.cli import screens
from flyer.job_events import narrate
from flyer.presenter import job_exit_status
from flyer.views import EventView, FailureView, JobView, WhyView, from_json, to_json

NODES = (
    AssignedNode(name="a0", zone="A", first_rank=0),
    AssignedNode(name="b0", zone="B", first_rank=2),
)
ASSIGNMENT = Assignment(epoch=1, nodes=NODES, bridge=("a0", "b0"), reserved_at=1.0, same_split=True)
OCCUPIED = tuple(OccupiedNode(name=node.name, zone=node.zone, attempt=1) for node in NODES)
RUNNING = FlyerJobStatus(
    phase=Phase.RUNNING, assignment=ASSIGNMENT, chain=Chain(id="c", attempt=1), occupied=OCCUPIED
)


def reasons(before, after):
    return [told.reason for told in narrate(before, after)]


def test_nothing_new_tells_nothing():
    assert reasons(RUNNING, RUNNING) == []


def test_a_start_tells_the_nodes_and_the_checkpoint_it_begins_with():
    saved = Checkpoint(step=40, time=1.0, path="/ckpt/40")
    queued = FlyerJobStatus(checkpoint=saved)
    starting = RUNNING.replace(phase=Phase.STARTING, checkpoint=saved)
    told = list(narrate(queued, starting))
    assert [one.reason for one in told] == ["Assigned", "Starting"]
    assert told[1].fields["restoredStep"] == 40
    assert "from step 40, same zone split" in told[1].message
    assert told[1].fields["nodes"][1] == {"name": "b0", "zone": "B", "firstRank": 2}


@pytest.mark.parametrize(
    ("same", "words", "column"),
    [(True, "same zone split", "same"), (False, "another zone split", "other"), (None, "", "-")],
)
def test_whether_a_start_sums_in_the_same_order_is_told_and_shown(same, words, column):
    starting = RUNNING.replace(phase=Phase.STARTING, assignment=ASSIGNMENT.replace(same_split=same))
    (_, told) = narrate(FlyerJobStatus(), starting)
    assert told.message.endswith(words)
    assert ("split" in told.message) == bool(words)
    past = History([event(1, "Submitted"), event(2, "Starting", 1, **told.fields)])
    (attempt,) = past.of("default/j").attempts
    assert attempt.same_split is same
    (_, _, row) = screens._attempts(SimpleNamespace(attempts=[attempt]))
    columns = row.split()
    assert columns[columns.index("beginning") + 1] == column


def test_a_suspension_is_told_step_by_step_and_its_deaths_are_not():
    asked = Suspension(reason="Preempted", by="default/high", since=1.0, deadline=61.0, limit=99.0)
    suspending = RUNNING.replace(
        phase=Phase.SUSPENDING, suspension=asked, suspend_code=SuspendCode.SENT
    )
    assert reasons(RUNNING, suspending) == ["SuspendSignalled"]
    received = suspending.replace(suspend_code=SuspendCode.RECEIVED)
    assert reasons(suspending, received) == ["SuspendReceived"]
    more = received.replace(suspension=asked.replace(deadline=80.0))
    assert reasons(received, more) == ["GraceExtended"]
    saved = more.replace(
        suspend_code=SuspendCode.MAY_SUSPEND, checkpoint=Checkpoint(step=7, time=2.0, path="/p")
    )
    assert reasons(more, saved) == ["CheckpointDurable", "Released"]
    killed = Exit(node="a0", outcome="Killed", signal=9, reason="", time=3.0)
    gone = saved.replace(exits=(killed,))
    assert reasons(saved, gone) == []
    eviction = Eviction(reason="Preempted", by="default/high", time=4.0, attempt=1, lost_steps=0)
    left = gone.replace(
        phase=Phase.QUEUED, suspension=None, assignment=None, occupied=(), eviction=eviction
    )
    told = list(narrate(gone, left))
    assert [one.reason for one in told] == ["NodesFree", "Evicted"]
    assert told[0].fields == {"nodes": 2}
    assert told[1].fields["lostSteps"] == 0
    assert not told[1].warning


def test_a_failing_pod_is_told_with_its_node_and_status():
    failed = Exit(node="a0", outcome="Failed", exit_status=3, reason="rank 1: Oops", time=3.0)
    (told,) = narrate(RUNNING, RUNNING.replace(exits=(failed,)))
    assert told.reason == "PodExited"
    assert told.node == "a0"
    assert "exited with status 3: rank 1: Oops" in told.message


def event(sequence, reason, attempt=None, **fields):
    return EventView(
        sequence, float(sequence), "Normal", reason, "", "default/j", attempt, "", fields
    )


def test_history_keeps_attempts_and_the_first_failing_rank():
    node = {"name": "a0", "zone": "A", "firstRank": 0}
    history = History(
        [
            event(1, "Submitted"),
            event(2, "Starting", 1, nodes=[node], restoredStep=None, sameSplit=None),
            event(3, "Evicted", 1, endsAttempt=True, why="Preempted", lostSteps=2),
            event(4, "Starting", 2, nodes=[node], restoredStep=40, sameSplit=True),
            event(5, "RankFailed", 2, rank=1, node="a0", exitStatus=1, signal=None, traceback="T"),
            event(6, "Failed", 2, endsAttempt=True, why="RankFailed"),
        ]
    )
    past = history.of("default/j")
    assert [(one.attempt, one.outcome, one.lost_steps) for one in past.attempts] == [
        (1, "Preempted", 2), (2, "RankFailed", None),
    ]  # fmt: skip
    assert past.attempts[1].restored_step == 40
    assert past.failure == FailureView(1, "a0", 1, None, "T")
    history.add(event(7, "Submitted"))
    assert history.of("default/j").attempts == []
    assert history.of("default/j").failure is None


def test_exit_statuses_follow_the_published_table():
    failed = FlyerJobStatus(phase=Phase.FAILED, reason="RankFailed")

    def status(exit_status=None, signal=None):
        return job_exit_status(failed, FailureView(0, "a0", exit_status, signal, ""))

    assert [status(code) for code in (1, 99, 100, 104, 127, 128, 129, 137, 193, 255)] == [
        1, 99, 100, 100, 100, 100, 129, 137, 100, 100,
    ]  # fmt: skip
    assert status(signal=9) == 137
    assert job_exit_status(failed, None) == 100
    assert job_exit_status(failed.replace(reason="Stopped"), None) == 103
    assert job_exit_status(FlyerJobStatus(phase=Phase.SUCCEEDED), None) == 0


def test_views_survive_json_and_newer_fields():
    why = WhyView("default/j", "Queued", "cannot", "s", 1, [], "", None, ["flyer stop x"], 3.5)
    document = to_json(why)
    assert document["preemptedBy"] == ""
    assert from_json(WhyView, {**document, "fromTheFuture": 1}) == why
    assert "first_rank" not in str(to_json(event(1, "x")))
    assert JobView.__dataclass_params__.frozen

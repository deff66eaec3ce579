"""Job events from statuses, and attempts from events, without a driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flyer.api import (
    AssignedNode,
    Assignment,
    Checkpoint,
    Eviction,
    Exit,
    FlyerJobStatus,
    JobHistory,
    OccupiedNode,
    Phase,
    SuspendCode,
    Suspension,
)
from flyer.api.pending import Pending
from flyer.attempt_history import History
from flyer.cli import screens
from flyer.job_events import RECORDED_REASONS, JobEvent, job_events, recorded_event
from flyer.presenter import job_exit_status
from flyer.views import EventView, FailureView, JobView, WhyView, from_json, to_json

NODES = (
    AssignedNode(name="a0", zone="A", first_rank=0),
    AssignedNode(name="b0", zone="B", first_rank=2),
)
ASSIGNMENT = Assignment(
    epoch=1, nodes=NODES, cross_zone_pair=("a0", "b0"), reserved_at=1.0, same_zone_layout=True
)
OCCUPIED = tuple(OccupiedNode(name=node.name, zone=node.zone, attempt=1) for node in NODES)
RUNNING = FlyerJobStatus(
    phase=Phase.RUNNING,
    assignment=ASSIGNMENT,
    history=JobHistory(id="c", attempt=1),
    occupied=OCCUPIED,
)


def reasons(before, after):
    return [event.reason for event in job_events(before, after)]


def test_an_unchanged_status_has_no_events():
    assert reasons(RUNNING, RUNNING) == []


def test_a_start_names_the_nodes_and_the_checkpoint_it_resumes_from():
    saved = Checkpoint(step=40, time=1.0, path="/ckpt/40")
    queued = FlyerJobStatus(checkpoint=saved)
    starting = RUNNING.replace(phase=Phase.STARTING, checkpoint=saved)
    assigned, start = job_events(queued, starting)
    assert (assigned.reason, start.reason) == ("Assigned", "Starting")
    assert start.fields["restoredStep"] == 40
    assert "from step 40, same distribution over zones" in start.message
    assert start.fields["nodes"][1] == {"name": "b0", "zone": "B", "firstRank": 2}


@pytest.mark.parametrize(
    ("same", "words", "column"),
    [
        (True, "same distribution over zones", "same"),
        (False, "another distribution over zones", "other"),
        (None, "", "-"),
    ],
)
def test_a_start_reports_whether_the_distribution_over_zones_is_the_same(same, words, column):
    starting = RUNNING.replace(
        phase=Phase.STARTING, assignment=ASSIGNMENT.replace(same_zone_layout=same)
    )
    (_, start) = job_events(FlyerJobStatus(), starting)
    assert start.message.endswith(words)
    assert ("distribution" in start.message) == bool(words)
    past = History([event(1, "Submitted"), event(2, "Starting", 1, **start.fields)])
    (attempt,) = past.of("default/j").attempts
    assert attempt.same_zone_layout is same
    (_, _, row) = screens._attempts(SimpleNamespace(attempts=[attempt]))
    columns = row.split()
    assert columns[columns.index("beginning") + 1] == column


def test_a_suspension_is_reported_step_by_step_without_its_exits():
    suspension = Suspension(
        reason="Preempted", by="default/high", since=1.0, deadline=61.0, limit=99.0
    )
    suspending = RUNNING.replace(
        phase=Phase.SUSPENDING, suspension=suspension, suspend_code=SuspendCode.SENT
    )
    assert reasons(RUNNING, suspending) == ["SuspendSignalled"]
    received = suspending.replace(suspend_code=SuspendCode.RECEIVED)
    assert reasons(suspending, received) == ["SuspendReceived"]
    more = received.replace(suspension=suspension.replace(deadline=80.0))
    assert reasons(received, more) == ["GraceExtended"]
    saved = more.replace(
        suspend_code=SuspendCode.MAY_SUSPEND, checkpoint=Checkpoint(step=7, time=2.0, path="/p")
    )
    assert reasons(more, saved) == ["CheckpointDurable", "Released"]
    killed = Exit(node="a0", outcome="Killed", signal=9, reason="", time=3.0)
    exited = saved.replace(exits=(killed,))
    assert reasons(saved, exited) == []
    eviction = Eviction(reason="Preempted", by="default/high", time=4.0, attempt=1, lost_steps=0)
    released = exited.replace(
        phase=Phase.QUEUED, suspension=None, assignment=None, occupied=(), eviction=eviction
    )
    free, preempted = job_events(exited, released)
    assert (free.reason, preempted.reason) == ("NodesFree", "Preempted")
    assert free.fields == {"nodes": 2}
    assert preempted.fields["lostSteps"] == 0
    assert not preempted.warning


def test_a_failing_pod_is_reported_with_its_node_and_status():
    failed = Exit(node="a0", outcome="Failed", exit_status=3, reason="rank 1: Oops", time=3.0)
    (exited,) = job_events(RUNNING, RUNNING.replace(exits=(failed,)))
    assert exited.reason == "PodExited"
    assert exited.node == "a0"
    assert "exited with status 3: rank 1: Oops" in exited.message


def event(sequence, reason, attempt=None, **fields):
    return EventView(
        sequence, float(sequence), "Normal", reason, "", "default/j", attempt, "", fields
    )


def test_history_keeps_attempts_and_the_first_failing_rank():
    node = {"name": "a0", "zone": "A", "firstRank": 0}
    history = History(
        [
            event(1, "Submitted"),
            event(2, "Starting", 1, nodes=[node], restoredStep=None, sameZoneLayout=None),
            event(3, "Preempted", 1, endsAttempt=True, why="Preempted", lostSteps=2),
            event(4, "Starting", 2, nodes=[node], restoredStep=40, sameZoneLayout=True),
            event(5, "RankFailed", 2, rank=1, node="a0", exitStatus=1, signal=None, traceback="T"),
            event(6, "Failed", 2, endsAttempt=True, why="RankFailed"),
        ]
    )
    past = history.of("default/j")
    assert [(view.attempt, view.outcome, view.lost_steps) for view in past.attempts] == [
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


def queued(reason: str, message: str = "2 of 4 nodes missing", **more: str) -> FlyerJobStatus:
    pending = Pending.model_validate({"reason": reason, "message": message, **more})
    return FlyerJobStatus(phase=Phase.QUEUED, pending=pending)


def test_the_reason_for_waiting_is_reported_once_per_queueing() -> None:
    waiting = recorded_event(queued("PendingEvaluation"), queued("WaitingForNodes"))
    assert waiting == JobEvent("WaitingForNodes", "2 of 4 nodes missing")
    assert recorded_event(None, queued("WaitingForZone")) is not None
    assert recorded_event(None, queued("PendingEvaluation")) is None
    assert recorded_event(queued("WaitingForNodes"), queued("WaitingForTurn")) is None
    never = recorded_event(None, queued("NoMatchingNodeClass", verdict="Never"))
    assert never is not None
    assert (never.reason, never.warning) == ("NeverFits", True)


def ended(phase: Phase, reason: str, message: str) -> FlyerJobStatus:
    return FlyerJobStatus(phase=phase, reason=reason, message=message)


def evicted(reason: str, message: str, **more: object) -> FlyerJobStatus:
    eviction = {"reason": reason, "message": message, "time": 5.0, "attempt": 1, **more}
    pending = {"reason": "PendingEvaluation", "message": "not evaluated yet"}
    value = {"phase": "Queued", "eviction": eviction, "pending": pending}
    return FlyerJobStatus.model_validate(value)


CROSS_ZONE = FlyerJobStatus.model_validate(
    {
        "phase": "Running", "zones": "A+B", "history": {"id": "c", "attempt": 2},
        "assignment": {
            "epoch": 1, "reservedAt": 1.0, "crossZonePair": ["a0", "b0"],
            "nodes": [
                {"name": "a0", "zone": "A", "firstRank": 0},
                {"name": "b0", "zone": "B", "firstRank": 1},
            ],
        },
        "checkpoint": {"step": 7, "path": "/c", "durable": True, "time": 4.0},
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("after", "reason", "message", "warning"),
    [
        (CROSS_ZONE, "Started", "attempt 2 runs on 2 nodes, zone A+B, from step 7", False),
        (ended(Phase.SUCCEEDED, "Complete", "done"), "Succeeded", "done", False),
        (
            ended(Phase.FAILED, "RankFailed", "a rank on node a0 exited with status 3"),
            "Failed", "RankFailed: a rank on node a0 exited with status 3", True,
        ),
        (
            evicted("Preempted", "preempted by ml/b", lostSteps=4),
            "Preempted", "preempted by ml/b; 4 steps lost", False,
        ),
        (evicted("Suspended", "by anna"), "Suspended", "by anna", False),
        (evicted("Requeued", "by anna"), "Requeued", "by anna", False),
        (evicted("Yielded", "released"), "Requeued", "Yielded: released", False),
        (evicted("NodeFailures", "lost a0"), "Restarted", "NodeFailures: lost a0", True),
        (evicted("PodsRefused", "it is full"), "PodsRefused", "it is full", True),
    ],
)  # fmt: skip
def test_the_most_important_event_of_a_commit_is_recorded(
    after: FlyerJobStatus, reason: str, message: str, warning: bool
) -> None:
    recorded = recorded_event(None, after)
    assert recorded is not None
    assert (recorded.reason, recorded.message, recorded.warning) == (reason, message, warning)
    assert recorded_event(after, after) is None
    assert reason in {event.reason for event in job_events(None, after)}
    assert reason in RECORDED_REASONS


def test_a_suspension_has_one_event() -> None:
    """The eviction; for a waiting job the change of its phase."""
    assert reasons(None, evicted("Suspended", "by anna").replace(phase=Phase.SUSPENDED)) == [
        "Suspended"
    ]
    waiting = FlyerJobStatus(phase=Phase.SUSPENDED)
    assert reasons(FlyerJobStatus(), waiting) == ["Suspended"]

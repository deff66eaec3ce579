"""Long queues: reasons and positions of waiting jobs, and what a plan costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api import Phase, Priority
from flyer.engine import (
    EngineState,
    GangStarted,
    JobFault,
    JobSubmitted,
    Node,
    Tick,
    explain,
    rebuild,
    step,
)
from flyer.engine.cycle import queue, schedule
from flyer.engine.events import QuotaObserved
from flyer.engine.quota import admission
from flyer.engine.state.quotas import Quota
from flyer.sim.samples import sample_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine import Event, JobState
    from flyer.engine.state.cycle_state import CycleState


def test_nodes_in_too_many_zones_are_not_searched_repeatedly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = []
    allocate = schedule.allocate
    monkeypatch.setattr(
        schedule, "allocate", lambda *args: (searched.append(args[1].key), allocate(*args))[1]
    )
    now = 1_800_000_000.0
    nodes = [
        Node(f"{zone.lower()}{index}", zone, slots=8, ready=index == 0)
        for zone in "ABC"
        for index in range(2)
    ]
    jobs = _queue_of(40, crossZone="Never", activeDeadline=lambda index: f"{index + 1}m")
    state, _ = step(rebuild(nodes, (), now, 1), jobs, now)
    assert searched == []  # each zone has one node that is ready
    assert not any(job.holding for job in state.jobs.values())


def _queue_of(count: int, *, users: int = 50, **wishes: object) -> list[Event]:
    events: list[Event] = []
    for index in range(count):
        fields = {
            name: value(index) if callable(value) else value for name, value in wishes.items()
        }
        job = sample_job(f"w{index}", 2, user=f"u{index % users}", ranksPerNode=8, **fields)
        metadata = job.metadata.replace(uid=f"uid{index}", creation_timestamp=1_800_000_000.0)
        events.append(JobSubmitted(job.replace(metadata=metadata)))
    return events


def _full_cluster() -> tuple[EngineState, float]:
    now = 1_800_000_000.0
    state = rebuild([Node("n0", "A", slots=8), Node("n1", "A", slots=8)], (), now, 1)
    job = sample_job("first", 2, user="other", ranksPerNode=8)
    metadata = job.metadata.replace(uid="first", creation_timestamp=now - 1)
    state, _ = step(state, [JobSubmitted(job.replace(metadata=metadata))], now)
    state, _ = step(state, [GangStarted("default/first", 1)], now + 1)
    return state, now + 1


def _with_flood_of_one_user(
    monkeypatch: pytest.MonkeyPatch, *further: Event, **wishes: object
) -> tuple[EngineState, float]:
    """Six different jobs of u0 wait, of which a plan looks at three."""
    monkeypatch.setattr(schedule, "_USER_JOBS_MAX", 3)
    state, now = _full_cluster()
    flood = _queue_of(6, users=1, activeDeadline=lambda index: f"{index + 1}m", **wishes)
    state, _ = step(state, [*flood, *further], now + 1)
    return state, now


def test_every_job_of_a_long_queue_has_a_reason_and_a_position() -> None:
    state, now = _full_cluster()
    state, _ = step(state, _queue_of(400), now + 1)
    # Simultaneous submissions are not evaluated in one step.
    state, _ = step(state, [Tick()], now + 2)
    pendings = [state.jobs[f"default/w{index}"].status.pending for index in range(400)]
    assert all(
        pending is not None and pending.reason != "PendingEvaluation" for pending in pendings
    )
    for _ in range(60):
        now += 30
        state, _ = step(state, [Tick()], now)
    order = sorted(f"default/w{index}" for index in range(400))
    positions = [state.jobs[key].status.pending.position for key in order]
    assert positions == list(range(1, 401))


def test_one_users_many_different_jobs_leave_time_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = _looks(monkeypatch)
    state, now = _full_cluster()
    flood = _queue_of(600, users=1, activeDeadline=lambda index: f"{index + 1}m")
    state, _ = step(state, flood, now + 1)
    late = sample_job("late", 1, user="late", ranksPerNode=8)
    late = late.replace(metadata=late.metadata.replace(uid="l", creation_timestamp=now + 2))
    looks.clear()
    state, _ = step(state, [JobSubmitted(late)], now + 2)
    assert looks.count("u0") == 256
    assert looks.count("late") == 1
    waits = state.jobs["default/w99"].status.pending
    assert waits is not None
    assert "256 jobs of u0" in waits.message


def test_a_user_with_many_jobs_gets_all_free_nodes_in_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "_USER_JOBS_MAX", 3)
    now = 1_800_000_000.0
    state = rebuild([Node(f"n{index}", "A", slots=8) for index in range(20)], (), now, 1)
    state, _ = step(state, _queue_of(10, users=1), now)
    assert all(job.holding for job in state.jobs.values())


def test_jobs_that_can_never_run_do_not_delay_other_jobs_of_their_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "_USER_JOBS_MAX", 3)
    now = 1_800_000_000.0
    state = rebuild([Node(f"n{index}", "A", slots=8) for index in range(4)], (), now, 1)
    classes = ("b", "c", "d", "e", "f", None)
    state, _ = step(state, _queue_of(6, users=1, nodeClass=lambda index: classes[index]), now)
    assert state.jobs["default/w5"].holding
    assert not state.jobs["default/w0"].holding


def _looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The user of each job that plans look at."""
    looks: list[str] = []
    look_at = schedule._SchedulingPass._try_job
    monkeypatch.setattr(
        schedule._SchedulingPass, "_try_job",
        lambda plan, job, key: (looks.append(job.user), look_at(plan, job, key))[1],
    )  # fmt: skip
    return looks


def test_a_plan_evaluates_few_of_many_different_jobs_larger_than_their_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "_USER_JOBS_MAX", 20)
    looks = _looks(monkeypatch)
    now = 1_800_000_000.0
    state = rebuild([Node(f"n{index}", "A", slots=8) for index in range(3)], (), now, 1)
    flood = _queue_of(200, users=1, activeDeadline=lambda index: f"{index + 1}m")
    state, _ = step(state, [QuotaObserved(Quota("q", "u0", nodes=1)), *flood], now + 1)
    assert looks.count("u0") <= 2 * 20
    for _ in range(60):  # all are evaluated in turn
        now += 30
        state, _ = step(state, [Tick()], now)
    looks.clear()
    small = JobSubmitted(sample_job("small", 1, user="u0", ranksPerNode=8))
    state, _ = step(state, [small], now + 1)
    assert looks.count("u0") <= 20 + 1
    assert state.jobs["default/small"].holding  # those that can never run are not ahead of it
    # A larger quota: they are evaluated again, and the first of them starts.
    state, _ = step(state, [QuotaObserved(Quota("q", "u0", nodes=3))], now + 2)
    assert state.jobs["default/w0"].holding


@pytest.mark.parametrize("larger", [False, True])
def test_auto_jobs_with_equal_requirements_share_a_class_at_each_level(
    monkeypatch: pytest.MonkeyPatch, larger: bool
) -> None:
    looks = _looks(monkeypatch)
    state, now = _full_cluster()
    flood = [
        JobSubmitted(sample_job(f"evil{index:03}", 1 + larger, user="evil", priority="auto"))
        for index in range(200)
    ]
    for event in flood:
        metadata = event.job.metadata.replace(creation_timestamp=now)
        flood[flood.index(event)] = JobSubmitted(event.job.replace(metadata=metadata))
    limits = [
        QuotaObserved(Quota("all", "evil", nodes=4)),
        QuotaObserved(Quota("high", "evil", "high", nodes=2)),
    ]
    state, _ = step(state, [*limits, *flood], now + 1)
    looks.clear()
    good = JobSubmitted(sample_job("good", 1, user="good"))
    state, _ = step(state, [good], now + 2)
    assert looks.count("evil") <= schedule._HEAD_JOBS + 4
    waits = state.jobs["default/evil100"].status.pending
    assert waits is not None
    assert "quota all has" in waits.message


def test_a_job_behind_too_many_of_its_user_reports_that_without_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, now = _with_flood_of_one_user(monkeypatch)
    explanation = explain(state, "default/w5", now + 2)
    assert "behind 3 jobs of u0" in explanation.summary
    assert explanation.remedies == ()  # released nodes are assigned to jobs ahead of it


def test_an_auto_job_at_its_next_level_behind_too_many_of_its_user_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    auto = _queue_of(1, users=1, priority="auto")[0]
    assert isinstance(auto, JobSubmitted)
    metadata = auto.job.metadata.replace(name="auto", uid="auto")
    limit = QuotaObserved(Quota("q", "u0", "extreme-high", nodes=0))
    submitted = JobSubmitted(auto.job.replace(metadata=metadata))
    state, now = _with_flood_of_one_user(monkeypatch, limit, submitted, priority="very-high")
    assert explain(state, "default/auto", now + 2).verdict == "cannot"


def test_a_plan_does_not_evaluate_auto_jobs_behind_too_many_of_their_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, now = _full_cluster()
    few = [QuotaObserved(Quota("evil", "evil", nodes=2))]
    flood = [
        JobSubmitted(sample_job(f"evil{index}", 2, user="evil", priority="auto"))
        for index in range(1000)
    ]
    state, _ = step(state, [*few, *flood], now)
    for name in ("x", "y"):  # plans that bring the queue up to date with the flood
        now += 1
        state, _ = step(state, [JobSubmitted(sample_job(name, 1, user=name))], now)
    searched: list[str] = []
    priorities = admission.allowed_priorities

    def counted(cycle: CycleState, job: JobState, limits: Sequence[Quota]) -> list[Priority]:
        searched.append(job.key)
        return priorities(cycle, job, limits)

    monkeypatch.setattr(admission, "allowed_priorities", counted)
    step(state, [JobSubmitted(sample_job("good", 1, user="good"))], now + 1)
    assert 0 < len(set(searched)) < 400  # 256 looks, and 20 reasons a second


def test_a_job_that_cannot_be_queued_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver then quarantines it, and the other jobs are scheduled."""
    needs_of = queue.needs_of

    def fails(cycle: CycleState, job: JobState) -> tuple[object, ...]:
        assert job.key != "default/w1", "a bug"
        return needs_of(cycle, job)

    monkeypatch.setattr(queue, "needs_of", fails)
    state, now = _full_cluster()
    with pytest.raises(JobFault) as excinfo:
        step(state, _queue_of(3), now + 1)
    assert excinfo.value.job == "default/w1"


def test_a_class_that_is_left_out_still_fills_its_users_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "_HEAD_JOBS", 0)
    now = 1_800_000_000.0
    nodes = [Node(f"n{index}", "A", slots=8) for index in range(4)]
    state = rebuild(nodes, (), now, 1, quotas=[Quota("q", "u", nodes=10)])
    sizes = {"first": ("other", 2), "a": ("u", 4), "b": ("u", 4), "c": ("u", 4), "small": ("u", 1)}
    events: list[Event] = []
    for index, (name, (user, size)) in enumerate(sizes.items()):
        job = sample_job(name, size, user=user, ranksPerNode=8)
        metadata = job.metadata.replace(uid=name, creation_timestamp=now + index)
        events.append(JobSubmitted(job.replace(metadata=metadata)))
    state, _ = step(state, events, now + 10)
    for second in range(3):
        state, _ = step(state, [Tick()], now + 11 + second)
    # a and b have the first reservations, on its ten nodes, and c waits for room: small is last.
    assert state.jobs["default/small"].status.phase is Phase.QUEUED
    assert state.jobs["default/first"].status.phase is Phase.STARTING

"""Statuses that only explain why jobs wait delay no decision, and are stored eventually."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

import pytest
from flyer.api import (
    AssignedNode,
    Assignment,
    Condition,
    Eviction,
    FlyerJobStatus,
    JobHistory,
    Pending,
    Phase,
)
from flyer.engine import Commit
from flyer.kube.apiserver import LeaseSettings, Limiter, Limits
from flyer.kube.apiserver.errors import OverloadedError
from flyer.kube.services.errors import StaleStateError
from flyer.kube.services.jobs import explanations as module
from flyer.kube.services.jobs.commits import BACKGROUND_WRITES_MAX, QUARANTINED
from flyer.kube.services.jobs.explanations import Explanations, only_explains

from fakekube.apiserver.faults import Fault

WAITS = FlyerJobStatus(
    phase=Phase.QUEUED,
    history=JobHistory(id="u"),
    pending=Pending(reason="WaitingForNodes", message="1"),
)

CONDITION = Condition(
    type="QuotaReserved", status="False", reason="WaitingForTurn", last_transition_time=1.0
)
PLACED = Assignment(
    epoch=1, nodes=(AssignedNode(name="a0", zone="A", first_rank=0),), reserved_at=1.0
)


def test_a_changed_reason_or_number_is_only_an_explanation():
    after = WAITS.replace(
        pending=Pending(reason="WaitingForTurn", message="2"), reason="WaitingForTurn", epoch=2,
        conditions=(CONDITION,),
        observed_generation=2,
    )  # fmt: skip
    assert only_explains(WAITS, after)
    assert only_explains(None, after)
    assert only_explains(None, after.replace(phase=Phase.SUSPENDED))


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (WAITS, {"phase": Phase.RESERVED}),
        (WAITS, {"phase": Phase.SUSPENDED}),
        (WAITS, {"history": JobHistory(id="u", attempt=1)}),
        (WAITS, {"eviction": Eviction(reason="Preempted", time=1.0, attempt=0)}),
        (WAITS.replace(phase=Phase.RUNNING, assignment=PLACED), {}),
        (WAITS.replace(phase=Phase.SUSPENDED), {}),
        (None, {"history": JobHistory(id="u", attempt=1)}),
    ],
)
def test_a_status_that_changes_more_than_the_reason_is_stored_first(before, changes):
    assert not only_explains(before, WAITS.replace(**changes))


def test_a_job_that_was_in_quarantine_is_stored_first():
    marked = Condition(
        type=QUARANTINED, status="True", reason="OperatorFault", last_transition_time=1.0
    )
    assert not only_explains(WAITS.replace(conditions=(marked,)), WAITS)


class _Commits:
    """Commits whose stored statuses all wait; the test answers writes."""

    def __init__(self):
        self.background = Limiter(BACKGROUND_WRITES_MAX, 1)
        self.written = []
        self.answers = asyncio.Queue()
        self.watch_tells = asyncio.Event()
        self.watch_tells.set()
        self.unheard = 0

    async def wait_observed(self, _job):
        self.unheard += 1
        await self.watch_tells.wait()
        self.unheard -= 1

    def stored(self, _job):
        return WAITS

    async def explain(self, commit):
        self.written.append(commit)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
async def explains():
    """Running `Explanations`, their commits, vanished jobs and requested rebuilds."""
    commits, vanished, confused = _Commits(), [], []
    explanations = Explanations(
        commits, lambda job: f"uid of {job}", vanished=lambda job, _uid: vanished.append(job),
        request_rebuild=confused.append,
    )  # fmt: skip
    task = asyncio.create_task(explanations.run())
    yield explanations, commits, vanished, confused
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_frequently_changing_reason_is_stored_in_its_turn(explains, until):
    explanations, commits, *_ = explains
    jobs = [f"default/j{index}" for index in range(2 * BACKGROUND_WRITES_MAX)]
    explanations.defer([Commit(job, WAITS) for job in jobs])
    latest = Commit(jobs[0], WAITS.replace(epoch=7))
    explanations.defer([latest])
    await until(lambda: len(commits.written) == BACKGROUND_WRITES_MAX)
    assert commits.written[0] == latest
    for _ in jobs:
        commits.answers.put_nowait(True)
    await until(lambda: len(commits.written) == len(jobs))
    assert [commit.job for commit in commits.written] == jobs


async def test_one_explanation_is_written_while_a_decision_is_stored(explains, until):
    explanations, commits, *_ = explains
    with commits.background.reduced():
        explanations.defer([Commit(f"default/j{index}", WAITS) for index in range(4)])
        await until(lambda: commits.written)
        commits.answers.put_nowait(True)
        await until(lambda: len(commits.written) == 2)
        assert len(explanations) == 2
    await until(lambda: len(commits.written) == 3)


async def test_writes_are_limited_by_observed_watch_events(explains, until):
    """Each write delays the events of slow watches further, and decisions wait for them."""
    explanations, commits, *_ = explains
    commits.watch_tells.clear()
    explanations.defer(
        [Commit(f"default/j{index}", WAITS) for index in range(3 * BACKGROUND_WRITES_MAX)]
    )
    for _ in range(3 * BACKGROUND_WRITES_MAX):
        commits.answers.put_nowait(True)
    await until(lambda: commits.unheard == BACKGROUND_WRITES_MAX)
    assert len(commits.written) == BACKGROUND_WRITES_MAX
    commits.watch_tells.set()
    await until(lambda: len(commits.written) == 3 * BACKGROUND_WRITES_MAX)


@pytest.mark.parametrize("decided", [False, True])
async def test_a_rejected_reason_is_retried_unless_a_decision_replaces_it(
    explains, until, monkeypatch, decided
):
    monkeypatch.setattr(module, "PAUSE_SECONDS_MAX", 0.01)
    explanations, commits, vanished, confused = explains
    why = Commit("default/a", WAITS)
    explanations.defer([why])
    await until(lambda: commits.written)
    if decided:
        decision = Commit("default/a", WAITS.replace(phase=Phase.RESERVED))
        assert explanations.defer([decision]) == [decision]
    commits.answers.put_nowait(OverloadedError("update", "busy"))
    if decided:
        explanations.defer([Commit("default/b", WAITS)])
        await until(lambda: len(commits.written) == 2)
        assert commits.written[1].job == "default/b"
        assert len(explanations) == 0
    else:
        await until(lambda: commits.written == [why, why])
    assert not vanished
    assert not confused


async def test_results_of_writes_are_reported(explains, until):
    explanations, commits, vanished, confused = explains
    explanations.defer([Commit("default/a", WAITS), Commit("default/b", WAITS)])
    commits.answers.put_nowait(False)
    commits.answers.put_nowait(StaleStateError("another writer"))
    await until(lambda: confused)
    assert vanished == ["default/a"]
    explanations.defer([Commit("default/c", WAITS)])
    await until(lambda: len(commits.written) == 3)
    explanations.forget("default/c")  # another object may have its name
    commits.answers.put_nowait(False)
    explanations.defer([Commit("default/d", WAITS)])
    await until(lambda: len(commits.written) == 4)
    assert vanished == ["default/a"]


async def test_pods_are_created_at_full_concurrency_while_reasons_are_stored(
    cluster, until, monkeypatch
):
    reduced = []
    reduce = Limiter.reduced
    monkeypatch.setattr(
        Limiter, "reduced", lambda limiter: (reduced.append(limiter), reduce(limiter))[1]
    )
    cluster.operator()
    names = ["first", "second"]
    for name in names:
        cluster.submit(name)
    await until(lambda: all(cluster.status(name).pending is not None for name in names))
    assert not reduced


async def test_a_suspension_does_not_wait_for_the_reasons_of_a_flood(cluster, until):
    cluster.nodes("A")
    cluster.operator()
    cluster.submit("runs")
    await until(lambda: cluster.phase("runs") is Phase.RUNNING)
    # Eight concurrent writes: 200 statuses take more than a second.
    cluster.server.faults.add(
        Fault(do="delay", verb="update", resource="flyerjobs/status", seconds=0.05, times=10**6)
    )
    flood = [f"w{index}" for index in range(200)]
    for name in flood:
        cluster.submit(name)

    def writes():
        return [name for name in flood if cluster.status(name).pending is not None]

    await until(writes)
    before = len(writes())
    cluster.edit("runs", suspend=True)
    await until(lambda: cluster.phase("runs") is not Phase.RUNNING)
    assert len(writes()) - before <= 32
    await until(lambda: len(writes()) >= len(flood) - 1)  # one of them starts instead


class _Gate:
    """Holds writes of reasons of jobs `w…` at the API server until it is opened."""

    def __init__(self, server, monkeypatch):
        self._open = asyncio.Event()
        self.held = []
        whole = server._call

        async def call(request, target, agent):
            if request.method == "PUT" and target.resource == "flyerjobs/status":
                phase = json.loads(await request.read())["status"]["phase"]
                if target.name.startswith("w") and phase == "Queued":
                    self.held.append(target.name)
                    await self._open.wait()
            return await whole(request, target, agent)

        monkeypatch.setattr(server, "_call", call)

    def open(self):
        self._open.set()


@pytest.fixture
async def flooded(cluster, until, monkeypatch):
    """`a` and `b` run on two of three nodes; larger jobs wait, with held writes of their reasons.

    Deadlines and the Lease are long enough for a busy host.
    """
    endless = Limits(answer_seconds=300.0, call_seconds=300.0)
    monkeypatch.setattr(sys.modules[type(cluster).__module__], "LIMITS", endless)
    gate = _Gate(cluster.server, monkeypatch)
    cluster.nodes("AAA")
    lease = LeaseSettings(
        namespace="fireflyer-system", duration_seconds=300, renew_seconds=200, retry_seconds=0.1
    )
    operator = cluster.operator(lease)
    for name in "ab":
        cluster.submit(name)
    await until(lambda: all(cluster.phase(name) is Phase.RUNNING for name in "ab"))
    names = [f"w{index}" for index in range(200)]
    for name in names:
        cluster.submit(name, 3)
    await until(lambda: len(operator.leader.term.state.jobs) == 2 + len(names))
    await until(lambda: len(gate.held) == BACKGROUND_WRITES_MAX)
    yield cluster, operator, gate, names
    gate.open()


def rebuilds(operator):
    return operator.metrics.registry.get_sample_value("flyer_scheduler_rebuilds_total") or 0


async def test_decisions_are_stored_while_the_server_answers_no_reason(flooded, until):
    cluster, operator, gate, names = flooded
    cluster.edit("b", suspend=True)
    await until(lambda: cluster.phase("b") is Phase.SUSPENDED)
    cluster.submit("c", priority="high")
    await until(lambda: cluster.phase("c") is Phase.RUNNING)
    assert len(gate.held) == BACKGROUND_WRITES_MAX
    gate.open()
    await until(lambda: all(cluster.status(name).pending is not None for name in names))
    assert rebuilds(operator) == 0


async def test_a_decision_follows_the_reason_of_its_job(flooded, until):
    cluster, operator, gate, _ = flooded
    job = gate.held[0]
    phases = []

    def saw(_change):
        phase = cluster.phase(job)
        if phase is not Phase.QUEUED or cluster.status(job).pending is not None:
            phases.append(phase)

    cluster.store.table("flyerjobs").watchers.add(saw)
    cluster.edit(job, priority="high")
    for name in "ab":
        cluster.edit(name, suspend=True)
    await until(lambda: operator.leader.term.state.jobs[f"default/{job}"].holding)
    assert not phases
    gate.open()
    await until(lambda: cluster.phase(job) is Phase.RUNNING)
    assert phases[0] is Phase.QUEUED
    order = [Phase.QUEUED, Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING]
    assert phases == sorted(phases, key=order.index)
    assert rebuilds(operator) == 0


async def test_the_reasons_that_a_leader_did_not_store_are_stored_by_the_next(flooded, until):
    cluster, operator, gate, names = flooded
    for name in "ab":
        cluster.edit(name, suspend=True)
    operator.kill()
    cluster.store.delete("leases", "flyer-operator", "fireflyer-system")
    cluster.operator()
    gate.open()
    await until(lambda: all(cluster.phase(name) is Phase.SUSPENDED for name in "ab"))

    def writes():
        return [name for name in names if cluster.status(name).pending is not None]

    await until(lambda: len(writes()) == len(names) - 1)  # one runs
    assert len([name for name in names if cluster.phase(name) is Phase.RUNNING]) == 1


async def test_a_reason_rejected_for_long_quarantines_its_job(cluster, until):
    cluster.nodes("A")
    cluster.operator()
    cluster.submit("runs")
    await until(lambda: cluster.phase("runs") is Phase.RUNNING)
    failing = Fault("refuse", resource="flyerjobs/status", name="w", code=500, times=10**6)
    cluster.server.faults.add(failing)
    for name in ("w", "x", "y"):
        cluster.submit(name)
    await until(lambda: all(cluster.status(name).pending is not None for name in "xy"))
    await until(lambda: failing.seen)
    count = 0
    while not [event for event in cluster.store.all("events") if event["reason"] == "Quarantined"]:
        cluster.submit(f"z{count}")
        await until(lambda name=f"z{count}": cluster.status(name).pending is not None)
        count += 1
    failing.times = 0
    await until(lambda: cluster.status("w").pending is not None)

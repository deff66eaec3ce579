"""Statuses that only say why jobs wait are stored while nothing else is to be decided."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from flyer.api import (
    AssignedNode,
    Assignment,
    Chain,
    Condition,
    Eviction,
    FlyerJobStatus,
    Pending,
    Phase,
)
from flyer.engine import Commit
from flyer.kube.client import Lane
from flyer.kube.services.commits import AT_ONCE, QUARANTINED
from flyer.kube.services.explanations import Explanations, only_explains
from flyer.kube.services.term import Term

from fakekube.faults import Fault

WAITS = FlyerJobStatus(
    phase=Phase.QUEUED, chain=Chain(id="u"), pending=Pending(reason="WaitingForNodes", message="1")
)

CONDITION = Condition(
    type="QuotaReserved", status="False", reason="WaitingForTurn", last_transition_time=1.0
)
PLACED = Assignment(
    epoch=1, nodes=(AssignedNode(name="a0", zone="A", first_rank=0),), reserved_at=1.0
)


def test_another_reason_or_number_only_explains():
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
        (WAITS, {"chain": Chain(id="u", attempt=1)}),
        (WAITS, {"eviction": Eviction(reason="Preempted", time=1.0, attempt=0)}),
        (WAITS.replace(phase=Phase.RUNNING, assignment=PLACED), {}),
        (WAITS.replace(phase=Phase.SUSPENDED), {}),
        (None, {"chain": Chain(id="u", attempt=1)}),
    ],
)
def test_whatever_moves_a_job_is_stored_first(before, changes):
    assert not only_explains(before, WAITS.replace(**changes))


def test_a_job_that_was_in_quarantine_is_stored_first():
    marked = Condition(
        type=QUARANTINED, status="True", reason="OperatorFault", last_transition_time=1.0
    )
    assert not only_explains(WAITS.replace(conditions=(marked,)), WAITS)


class _Commits:
    """Every job waits, as far as is stored."""

    def __init__(self):
        self.written = []

    def stored(self, _job):
        return WAITS

    async def store(self, commits, _gone, *, urgent):
        assert not urgent
        self.written += commits


async def test_a_job_whose_reason_changes_again_and_again_is_stored_in_its_turn():
    commits = _Commits()
    explanations = Explanations(commits)
    jobs = [f"default/j{index}" for index in range(2 * AT_ONCE)]
    explanations.put_aside([Commit(job, WAITS) for job in jobs])
    latest = Commit(jobs[0], WAITS.replace(epoch=7))
    explanations.put_aside([latest])
    await explanations.store_some()
    assert commits.written[0] == latest
    assert [one.job for one in commits.written] == jobs[:AT_ONCE]


@pytest.mark.parametrize(("due", "written"), [(True, AT_ONCE), (False, 3 * AT_ONCE)])
async def test_a_job_in_quarantine_is_tried_again_before_all_reasons_are_stored(due, written):
    commits = _Commits()
    explanations = Explanations(commits)
    explanations.put_aside([Commit(f"default/j{index}", WAITS) for index in range(3 * AT_ONCE)])
    term = SimpleNamespace(
        _explanations=explanations, _stale="", _wake_at=math.inf,
        _inbox=SimpleNamespace(is_due=False),
        _left=SimpleNamespace(wait_seconds=lambda: 0.0 if due else math.inf),
    )  # fmt: skip
    await Term._explain(term)
    assert len(commits.written) == written


async def test_pods_are_made_at_full_width_while_reasons_are_stored(cluster, until, monkeypatch):
    narrowed = []
    narrow = Lane.narrowed
    monkeypatch.setattr(Lane, "narrowed", lambda lane: (narrowed.append(lane), narrow(lane))[1])
    cluster.operator()
    names = ["first", "second"]
    for name in names:
        cluster.submit(name)
    await until(lambda: all(cluster.status(name).pending is not None for name in names))
    assert not narrowed


async def test_a_suspension_does_not_wait_for_the_reasons_of_a_flood(cluster, until):
    cluster.nodes("A")
    cluster.operator()
    cluster.submit("runs")
    await until(lambda: cluster.phase("runs") is Phase.RUNNING)
    # Eight at once: 200 statuses take more than a second.
    cluster.server.faults.add(
        Fault(do="delay", verb="update", resource="flyerjobs/status", seconds=0.05, times=10**6)
    )
    flood = [f"w{index}" for index in range(200)]
    for name in flood:
        cluster.submit(name)

    def told():
        return [name for name in flood if cluster.status(name).pending is not None]

    await until(told)
    before = len(told())
    cluster.edit("runs", suspend=True)
    await until(lambda: cluster.phase("runs") is not Phase.RUNNING)
    assert len(told()) - before <= 32
    await until(lambda: len(told()) >= len(flood) - 1)  # one of them starts instead

"""Steps with faults: no rank waits forever, and each failed rank names a lost one.

The soak has 100,000 seeds; FAILURE_SEEDS changes that.
"""

import os
from collections import Counter

import pytest
from haiscale.model.cards import Sharing
from haiscale.model.failures import (
    Detection,
    Fault,
    FaultKind,
    FaultySimulation,
    Scenario,
    problems,
)
from haiscale.model.pipelines import Pipeline, Sum, Times
from haiscale.pipeline.schedules import one_f_one_b

SEEDS = 400


class KeepsAborts(FaultySimulation):
    """Defect: a failed rank does not abort its other groups."""

    def forward(self, number, lost):
        pass


class NamesTheMessenger(FaultySimulation):
    """Defect: a rank reports the neighbor that failed because of the loss."""

    def forward(self, number, lost):
        super().forward(number, number)


class WithoutLiveness(FaultySimulation):
    """Defect: silence is not noticed."""

    def _report(self, lost, delay):
        if delay < self.detection.liveness:
            super()._report(lost, delay)


def wrong(seeds, kind=FaultySimulation):
    return [text for seed in seeds for text in problems(Scenario.of(seed), kind)[1]]


def test_no_rank_hangs_and_each_lost_rank_is_named():
    assert wrong(range(SEEDS)) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_rank_hangs_with_many_seeds():
    seeds = int(os.environ.get("FAILURE_SEEDS", "100000"))
    assert wrong(range(SEEDS, SEEDS + seeds)) == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (KeepsAborts, "deadlock"),
        (NamesTheMessenger, "which was not lost"),
        (WithoutLiveness, "deadlock"),
    ],
)
def test_defects_are_noticed(kind, expected):
    found = wrong(range(SEEDS), kind)
    assert any(expected in text for text in found)


def test_the_scenarios_differ():
    outcomes = Counter()
    for seed in range(SEEDS):
        outcome, _ = problems(Scenario.of(seed))
        outcomes["failed" if outcome.failed else "ended"] += 1
    assert min(outcomes["failed"], outcomes["ended"]) > SEEDS / 5
    kinds = {fault.kind for seed in range(SEEDS) for fault in Scenario.of(seed).faults}
    assert kinds == set(FaultKind)


def scenario(*faults):
    """A step of 1F1B with these faults."""
    pipeline = Pipeline(one_f_one_b(3, 6), 2, Times(1, 2), 0.2, gradients=Sum(1.0, 2))
    return Scenario(0, pipeline, Sharing.TURNS, faults, Detection())


def test_a_short_stop_fails_no_rank_and_a_long_one_names_the_stopped_rank():
    undisturbed, _ = problems(scenario())
    short, _ = problems(scenario(Fault(1, 2.0, FaultKind.STOP, 4.9)))
    assert not short.failed
    assert short.seconds > undisturbed.seconds
    long, wrong_ = problems(scenario(Fault(1, 2.0, FaultKind.STOP, 30.0)))
    assert not wrong_
    assert {named for _, named in long.failed.values()} == {1}


def test_an_error_is_reported_sooner_than_silence():
    killed, _ = problems(scenario(Fault(0, 2.0, FaultKind.KILL)))
    failed, _ = problems(scenario(Fault(0, 2.0, FaultKind.ERROR)))
    last = [max(time for time, _ in outcome.failed.values()) for outcome in (failed, killed)]
    assert last[0] < last[1]

"""Faults in simulated steps: ranks that are killed, fail or stop, at random moments.

A lost rank is reported to its groups: after `Detection.liveness` if it is silent, at once if it
fails with an error. A rank that learns of the loss fails with the lost rank's name and aborts all
its groups with that name: it reaches ranks that share no group with the lost one. These are the
rules of HFReduce's groups.

`Scenario.of(seed)` generates a scenario. `problems` runs and checks it: every rank ends, and each
failed rank names a lost one in time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from haiscale.model.cards import Sharing
from haiscale.model.pipelines import Pipeline, Sum, Times, random_schedule
from haiscale.model.simulator import DeadlockError, Outcome, Simulation
from haiscale.pipeline.schedules import NAMES, build

if TYPE_CHECKING:
    from haiscale.model.pipelines import Programs
    from haiscale.pipeline.actions import Schedule

__all__ = ["Detection", "Fault", "FaultKind", "FaultySimulation", "Scenario", "problems"]


class FaultKind(StrEnum):
    """What happens to a rank."""

    KILL = "kill"
    """It ends without a message."""
    ERROR = "error"
    """It fails and aborts its groups."""
    STOP = "stop"
    """It does not compute for some time. Its transfers continue."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one rank."""

    rank: int
    at: float
    kind: FaultKind
    seconds: float = 0.0
    """Duration of a stop."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Times of the detection of failures."""

    liveness: float = 5.0
    """Silence after which a rank counts as lost."""
    abort: float = 0.01
    """Time of an abort message."""


class FaultySimulation(Simulation):
    """A simulation with faults. Ranks must not wait forever: DeadlockError is a defect."""

    def __init__(
        self,
        programs: Programs,
        sharing: Sharing,
        faults: tuple[Fault, ...],
        groups: tuple[tuple[int, ...], ...],
        detection: Detection,
    ) -> None:
        super().__init__(programs.actions, programs.nodes, sharing, programs.collectives)
        self.detection = detection
        self.lost: dict[int, float] = {}
        """Ranks that were lost, and when."""
        self._groups: list[list[tuple[int, ...]]] = [[] for _ in self.ranks]
        for group in groups:
            for rank in group:
                self._groups[rank].append(group)
        self._stopped_until = [0.0] * len(self.ranks)
        self._aborted: dict[int, int] = {}
        """Ranks whose groups were aborted while they were busy."""
        for fault in faults:
            self.at(fault.at, self._fault, fault)

    def _fault(self, fault: Fault) -> None:
        number, rank = fault.rank, self.ranks[fault.rank]
        if not rank.is_up:
            return
        if fault.kind is not FaultKind.STOP:
            self.lost.setdefault(number, self.now)
            rank.is_up = False
            self.drop_transfers(number)
            is_silent = fault.kind is FaultKind.KILL
            self._report(number, self.detection.liveness if is_silent else self.detection.abort)
            return
        until = self.now + fault.seconds
        if rank.computes_until > self.now:
            rank.computes_until += fault.seconds
        self._stopped_until[number] = max(until, self._stopped_until[number])
        if fault.seconds >= self.detection.liveness:
            self.lost.setdefault(number, self.now)
            self._report(number, self.detection.liveness)

    def _report(self, lost: int, delay: float) -> None:
        for group in self._groups[lost]:
            self.at(self.now + delay, self.abort, group, lost)

    def _execute(self, number: int) -> None:
        until = self._stopped_until[number]
        if until > self.now:
            self.at(until, self._resume, number)
        elif number in self._aborted:
            self._fail(number, self._aborted[number])
        else:
            super()._execute(number)

    def _resume(self, number: int) -> None:
        self._runnable.append(number)

    def abort(self, group: tuple[int, ...], lost: int) -> None:
        """A group is aborted because of a lost rank."""
        for number in group:
            if self.ranks[number].is_up:
                self._fail(number, lost)

    def _fail(self, number: int, lost: int) -> None:
        """A rank fails, once it neither computes nor is stopped."""
        rank = self.ranks[number]
        busy_until = max(rank.computes_until, self._stopped_until[number])
        if not rank.is_up:
            return
        if busy_until > self.now:
            self._aborted.setdefault(number, lost)
            self.at(busy_until, self._fail, number, lost)
            return
        rank.is_up = False
        self.outcome.failed[number] = self.now, lost
        self.drop_transfers(number)
        self.forward(number, lost)

    def forward(self, number: int, lost: int) -> None:
        """A failed rank aborts its groups with the name of the lost rank."""
        for group in self._groups[number]:
            self.at(self.now + self.detection.abort, self.abort, group, lost)


def _schedule(draw: random.Random, ranks: int) -> Schedule:
    """One of the named schedules, or a random valid order."""
    if draw.random() < 0.5:
        return random_schedule(draw, ranks, draw.randint(1, 3), draw.randint(1, 10))
    name, microbatches = draw.choice(NAMES), ranks * draw.randint(2, 3)
    stages_per_rank = draw.randint(1, 3) if name == "Interleaved1F1B" else 1
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A step with faults."""

    seed: int
    pipeline: Pipeline
    sharing: Sharing
    faults: tuple[Fault, ...]
    detection: Detection

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """The scenario of a seed."""
        draw = random.Random(seed)  # noqa: S311
        ranks, replicas = draw.randint(1, 5), draw.randint(1, 4)
        schedule = _schedule(draw, ranks)
        sums = Sum(draw.uniform(0, 4), draw.randint(1, 3), draw.random() < 0.8)
        pipeline = Pipeline(
            schedule,
            replicas,
            Times(1.0, draw.uniform(1.5, 3)),
            draw.choice((0.0, draw.uniform(0, 1.5))),
            draw.random() < 0.3,
            sums if draw.random() < 0.8 else None,
            draw.choice((0.0, 0.02, 0.5)),
            seed,
        )
        sharing = draw.choice(list(Sharing))
        detection = Detection()
        faults = tuple(
            Fault(
                draw.randrange(ranks * replicas),
                draw.uniform(0, 40),
                draw.choice(list(FaultKind)),
                detection.liveness * draw.choice((0.1, 0.9, 1.1, 3)),
            )
            for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))
        )
        return cls(seed, pipeline, sharing, faults, detection)

    def simulation(self, kind: type[FaultySimulation] = FaultySimulation) -> FaultySimulation:
        """The scenario's simulation; a group for each pipeline, and for the replicas of a rank."""
        replicas, ranks = self.pipeline.replicas, len(self.pipeline.schedule.ranks)
        pipelines = [tuple(range(n, ranks * replicas, replicas)) for n in range(replicas)]
        stages = [tuple(range(n * replicas, (n + 1) * replicas)) for n in range(ranks)]
        groups = (*pipelines, *stages)
        return kind(self.pipeline.build(), self.sharing, self.faults, groups, self.detection)


def problems(
    scenario: Scenario, kind: type[FaultySimulation] = FaultySimulation
) -> tuple[Outcome, list[str]]:
    """Runs a scenario. Returns its outcome, and what is wrong with it."""
    simulation = scenario.simulation(kind)
    try:
        outcome = simulation.run()
    except DeadlockError as error:
        return simulation.outcome, [f"seed {scenario.seed}: {error}"]
    wrong = []
    detection = scenario.detection
    # A computation and a stop may delay what a rank notices.
    longest = scenario.pipeline.times.backward * (1 + scenario.pipeline.jitter)
    longest += sum(fault.seconds for fault in scenario.faults if fault.kind is FaultKind.STOP)
    for rank, (time, named) in outcome.failed.items():
        lost_at = simulation.lost.get(named)
        if lost_at is None or lost_at > time:
            wrong.append(f"rank {rank} names rank {named}, which was not lost at {time:.3f}")
    if simulation.lost:
        deadline = min(simulation.lost.values()) + detection.liveness
        deadline += 4 * (detection.abort + longest)
        late = [rank for rank, (time, _) in outcome.failed.items() if time > deadline]
        wrong += [f"rank {rank} failed after {deadline:.3f}" for rank in late]
    accounted = outcome.ended.keys() | outcome.failed.keys() | simulation.lost.keys()
    wrong += [f"rank {n} has no result" for n in range(len(simulation.ranks)) if n not in accounted]
    return outcome, [f"seed {scenario.seed}: {problem}" for problem in wrong]

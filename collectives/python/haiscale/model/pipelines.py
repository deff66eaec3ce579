"""Programs of pipelines: schedules, times and transfers as the actions of ranks.

    programs = Pipeline(one_f_one_b(4, 16), replicas=2, times=Times(1, 2), hop_seconds=0.3).build()
    run(programs.actions, programs.nodes, sharing=Sharing.TURNS)

Schedules are those of `haiscale.pipeline`; communication is added here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from haiscale.model.actions import Collective, Compute, Finish, Receive, Send, Start
from haiscale.pipeline.actions import Action as Step
from haiscale.pipeline.actions import Kind as Pass
from haiscale.pipeline.actions import Schedule
from haiscale.pipeline.check import check

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from haiscale.model.actions import Action

__all__ = ["Pipeline", "Programs", "Sum", "Times", "random_schedule", "steady"]


def random_schedule(draw: random.Random, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """A valid schedule in a random order.

    Args:
        draw: Source of random numbers.
        ranks: Ranks of the pipeline.
        chunks: Stages of each rank; every second row of stages runs backward through the ranks or
            starts again at the first one.
        microbatches: Micro-batches; the backward pass of each is whole or in two parts.
    """
    stages, is_v = ranks * chunks, draw.random() < 0.5
    rows: list[list[Step]] = [[] for _ in range(ranks)]
    back = [draw.choice((Pass.BACKWARD, Pass.INPUT)) for _ in range(microbatches)]
    # What each micro-batch can do next: its forward or backward pass, and gradients of weights.
    ready = [Step(0, Pass.FORWARD, number) for number in range(microbatches)]
    losses = 0
    while ready:
        # The last stage takes the micro-batches in their order.
        due = Step(stages - 1, Pass.FORWARD, losses)
        step = draw.choice([step for step in ready if step[:2] != due[:2] or step == due])
        ready.remove(step)
        stage, kind, number = step
        row, place = divmod(stage, ranks)
        rows[ranks - 1 - place if is_v and row % 2 else place].append(step)
        if kind is Pass.FORWARD:
            is_last = stage == stages - 1
            losses += is_last
            following = Step(stage, back[number], number)
            ready.append(following if is_last else Step(stage + 1, kind, number))
        elif kind is not Pass.WEIGHT and stage > 0:
            ready.append(Step(stage - 1, kind, number))
        if kind is Pass.INPUT:
            ready.append(Step(stage, Pass.WEIGHT, number))
    return Schedule("random", stages, microbatches, tuple(map(tuple, rows)))


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a stage for one micro-batch."""

    forward: float
    backward: float
    input_share: float = 0.5
    """Part of the backward pass that computes the gradient of the input."""

    def of(self, kind: Pass) -> float:
        """Time of a pass."""
        if kind is Pass.FORWARD:
            return self.forward
        if kind is Pass.BACKWARD:
            return self.backward
        share = self.input_share if kind is Pass.INPUT else 1 - self.input_share
        return self.backward * share


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum of a stage's gradients over its replicas, at the end of the step."""

    seconds: float
    """Of the whole stage, with the whole card."""
    pieces: int = 1
    """Parts, in the order of the last backward pass; each is sent once its gradients are there."""
    on_card: bool = True
    """False for replicas on one node."""


class Programs(NamedTuple):
    """Action lists of all ranks, their nodes, and the collectives."""

    actions: list[list[Action]]
    nodes: list[int]
    collectives: dict[Hashable, Collective]


SENT_BACK: Final = frozenset({Pass.BACKWARD, Pass.INPUT})
"""Passes whose result the previous stage needs."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Replicas of one pipeline: rank r of the schedule is on node r for all of them.

    Rank numbers: schedule rank * replicas + replica.
    """

    schedule: Schedule
    replicas: int
    times: Times
    hop_seconds: float = 0.0
    """Time of one micro-batch's activations, or of their gradients, with the whole card."""
    blocking: bool = False
    """Whether a rank waits for its sends."""
    gradients: Sum | None = None
    jitter: float = 0.0
    """Each computation takes its time times 1 + u, u uniform in [-jitter, jitter]."""
    seed: int = 0
    owners: tuple[int, ...] = field(init=False)
    """Schedule rank of each stage."""

    def __post_init__(self) -> None:
        """Refuses schedules that are invalid or deadlock."""
        check(self.schedule)
        object.__setattr__(self, "owners", self.schedule.rank_of())

    def build(self) -> Programs:
        """The programs."""
        generator = random.Random(self.seed)  # noqa: S311
        actions, nodes = [], []
        for rank in range(len(self.schedule.ranks)):
            for replica in range(self.replicas):
                actions.append(self._program(rank, replica, generator))
                nodes.append(rank)
        collectives: dict[Hashable, Collective] = {}
        if self.gradients:
            for rank in range(len(self.schedule.ranks)):
                collectives |= self._sums(rank, self.gradients)
        return Programs(actions, nodes, collectives)

    def _sums(self, rank: int, gradients: Sum) -> dict[Hashable, Collective]:
        ranks = tuple(range(rank * self.replicas, (rank + 1) * self.replicas))
        seconds = gradients.seconds / gradients.pieces
        return {
            ("sum", rank, piece): Collective(ranks, seconds, on_card=gradients.on_card)
            for piece in range(gradients.pieces)
        }

    def _program(self, rank: int, replica: int, generator: random.Random) -> list[Action]:
        steps = self.schedule.ranks[rank]
        program: list[Action] = []
        for index, step in enumerate(steps):
            factor = 1 + generator.uniform(-self.jitter, self.jitter)
            seconds = self.times.of(step.kind) * factor
            is_last = index == len(steps) - 1
            program += self._step(replica, step, seconds, is_last=is_last)
        if self.gradients:
            program += [Finish(("sum", rank, piece)) for piece in range(self.gradients.pieces)]
        return program

    def _step(self, replica: int, step: Step, seconds: float, *, is_last: bool) -> list[Action]:
        stage, kind, microbatch = step
        back = kind in SENT_BACK
        actions: list[Action] = []
        source = stage + 1 if back else stage - 1
        if kind is not Pass.WEIGHT and self._is_remote(stage, source):
            name = ("B" if back else "F", source, microbatch)
            actions.append(Receive(self._rank(source, replica), name))
        if is_last and self.gradients:
            pieces = self.gradients.pieces
            for piece in range(pieces):
                actions.append(Compute(seconds / pieces, step))
                actions.append(Start(("sum", self.owners[stage], piece)))
        else:
            actions.append(Compute(seconds, step))
        to = stage - 1 if back else stage + 1
        if kind is not Pass.WEIGHT and self._is_remote(stage, to):
            name = ("B" if back else "F", stage, microbatch)
            target = self._rank(to, replica)
            actions.append(Send(target, name, self.hop_seconds, self.blocking))
        return actions

    def _is_remote(self, stage: int, other: int) -> bool:
        """Whether another stage is there and belongs to another rank."""
        is_there = 0 <= other < len(self.owners)
        return is_there and self.owners[other] != self.owners[stage]

    def _rank(self, stage: int, replica: int) -> int:
        return self.owners[stage] * self.replicas + replica


SIMULATED_ROUNDS: Final = 5
"""Rounds of as many micro-batches as stages after which a step is in its steady state."""


def steady(simulated: Callable[[int], float], microbatches: int, stages: int) -> float:
    """Time of a step with many micro-batches, of which few are simulated.

    Without jitter, the steady state repeats after as many micro-batches as stages.
    """
    rounds = max(microbatches // stages - SIMULATED_ROUNDS, 0)
    few = microbatches - rounds * stages
    seconds = simulated(few)
    if rounds:
        seconds += rounds * (seconds - simulated(few - stages))
    return seconds

"""Plays a schedule with given times: when each action runs, bubbles, and activations in flight.

An action starts when its rank has finished the action before it and all inputs are there. A
transfer between two ranks takes `hop`, occupies neither of them and never waits for another one:
the card is not modelled here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from haiscale.pipeline.actions import Action, Kind, Schedule, ScheduleError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Span", "Timeline", "in_flight", "needs", "play", "unit"]


class Span(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of each rank, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def end(self) -> float:
        """Time of the whole step."""
        return max(spans[-1].end for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks compute nothing, as the mean over the ranks."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1 - busy / (len(self.ranks) * self.end)


def unit(action: Action) -> float:
    """Time 1 for forward passes and for each part of backward passes; 2 for whole ones."""
    return 2.0 if action.kind is Kind.BACKWARD else 1.0


def needs(action: Action, last_stage: int) -> tuple[tuple[Action, ...], ...]:
    """The inputs of an action: for each, the actions of which one must have ended."""
    stage, kind, microbatch = action
    own = (Action(stage, Kind.FORWARD, microbatch),)
    if kind is Kind.FORWARD:
        return ((Action(stage - 1, kind, microbatch),),) if stage else ()
    if kind is Kind.WEIGHT:
        return ((Action(stage, Kind.INPUT, microbatch),),)
    if stage == last_stage:
        return (own,)
    after = tuple(Action(stage + 1, each, microbatch) for each in (Kind.BACKWARD, Kind.INPUT))
    return own, after


def play(
    schedule: Schedule, seconds: Callable[[Action], float] = unit, hop: float = 0.0
) -> Timeline:
    """When each action runs.

    Args:
        schedule: The schedule.
        seconds: Time of an action; default: `unit`.
        hop: Time of a transfer between two ranks.

    Raises:
        ScheduleError: The schedule deadlocks; the error lists what each rank waits for.
    """
    rank_of = schedule.rank_of()
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    # Ranks that wait for an action, woken when it has ended.
    waiting: defaultdict[Action, list[int]] = defaultdict(list)

    def arrival(rank: int, sources: tuple[Action, ...]) -> float | None:
        source = next((each for each in sources if each in ended), None)
        if source is None:
            for each in sources:
                waiting[each].append(rank)
            return None
        return ended[source] + (hop if rank_of[source.stage] != rank else 0.0)

    runnable = list(range(len(schedule.ranks)))
    while runnable:
        rank = runnable.pop()
        for action in schedule.ranks[rank][len(spans[rank]) :]:
            arrivals = [arrival(rank, each) for each in needs(action, schedule.stages - 1)]
            known = [each for each in arrivals if each is not None]
            if len(known) < len(arrivals):
                break
            start = max([spans[rank][-1].end if spans[rank] else 0.0, *known])
            spans[rank].append(Span(action, start, start + seconds(action)))
            ended[action] = spans[rank][-1].end
            runnable += waiting.pop(action, [])
    _refuse_deadlock(schedule, [len(each) for each in spans])
    return Timeline(tuple(map(tuple, spans)))


def in_flight(schedule: Schedule, rank: int) -> int:
    """The largest number of stage inputs that a rank holds for backward passes at the same time.

    An input is held from the forward pass to the backward pass, or to its part for weights.
    """
    held = most = 0
    for action in schedule.ranks[rank]:
        held += (action.kind is Kind.FORWARD) - (action.kind in {Kind.BACKWARD, Kind.WEIGHT})
        most = max(most, held)
    return most


def _refuse_deadlock(schedule: Schedule, progress: list[int]) -> None:
    stuck = [
        (rank, actions[count])
        for rank, (actions, count) in enumerate(zip(schedule.ranks, progress, strict=True))
        if count < len(actions)
    ]
    if not stuck:
        return
    shown = ", ".join(f"rank {rank} at {action}" for rank, action in stuck)
    rank, action = stuck[0]
    raise ScheduleError(
        f"schedule {schedule.name!r} deadlocks: {shown} wait for actions that come later",
        "move an action behind those whose results it uses",
        rank=rank,
        stage=action.stage,
        microbatch=action.microbatch,
    )

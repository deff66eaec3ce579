"""Validation of schedules: every computation once, each stage on one rank, and no deadlock."""

from __future__ import annotations

from collections import Counter

from haiscale.pipeline.actions import Action, Kind, Schedule, ScheduleError
from haiscale.pipeline.timing import play

__all__ = ["check"]


def check(schedule: Schedule, *, ranks: int | None = None) -> None:
    """Raises `ScheduleError` for the first problem of a schedule.

    Every stage must have, for each micro-batch, one forward pass and either one backward pass or
    one pair of its parts, all on one rank, and the order of the actions must not deadlock.

    Args:
        schedule: From `schedules`, or read from CSV.
        ranks: Number of ranks that are going to run it; None: any.
    """
    if ranks is not None and len(schedule.ranks) != ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {len(schedule.ranks)} ranks, but the pipeline has "
            f"{ranks}",
            f"build it for {ranks} ranks",
        )
    _check_range(schedule)
    _check_placement(schedule)
    counts = Counter(action for actions in schedule.ranks for action in actions)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            _check_passes(counts, stage, microbatch)
    _check_losses(schedule)
    play(schedule)


def _check_range(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            known = 0 <= action.stage < schedule.stages
            if not known or not 0 <= action.microbatch < schedule.microbatches:
                raise ScheduleError(
                    f"rank {rank}: {action} is outside of {schedule.stages} stages and "
                    f"{schedule.microbatches} micro-batches",
                    "correct the action, or the sizes of the schedule",
                    rank=rank,
                    stage=action.stage,
                    microbatch=action.microbatch,
                )


def _check_placement(schedule: Schedule) -> None:
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        if not actions:
            raise ScheduleError(
                f"rank {rank} has no actions", "give it a stage, or use fewer ranks", rank=rank
            )
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} is on the ranks {rank_of[action.stage]} and {rank}",
                    "put all actions of a stage on one rank",
                    rank=rank,
                    stage=action.stage,
                    microbatch=action.microbatch,
                )


def _check_passes(counts: Counter[Action], stage: int, microbatch: int) -> None:
    def number(kind: Kind) -> int:
        return counts[Action(stage, kind, microbatch)]

    found = [kind.value for kind in Kind for _ in range(number(kind))]
    if found in (["F", "B"], ["F", "I", "W"]):
        return
    listed = ", ".join(found) if found else "no action"
    raise ScheduleError(
        f"stage {stage}, micro-batch {microbatch}: has {listed}",
        "schedule one F, and either one B or one I and one W",
        stage=stage,
        microbatch=microbatch,
    )


def _check_losses(schedule: Schedule) -> None:
    """The runtime stores losses in the order of forward passes and reads them by number."""
    last = schedule.stages - 1
    rank = schedule.rank_of()[last]
    passes = [a for a in schedule.ranks[rank] if (a.stage, a.kind) == (last, Kind.FORWARD)]
    for expected, action in enumerate(passes):
        if action.microbatch != expected:
            raise ScheduleError(
                f"stage {last}: the forward pass of micro-batch {action.microbatch} is in place "
                f"{expected}",
                "order the forward passes of the last stage by micro-batch",
                rank=rank,
                stage=last,
                microbatch=action.microbatch,
            )

"""Schedules of pipelines: functions of ranks and micro-batches that return lists of actions.

| name | stages on a rank | bubble of equal stages | micro-batches in flight at rank k of p |
|---|---|---|---|
| `GPipe` | 1 | (p - 1) / (m + p - 1) | m |
| `1F1B` | 1 | (p - 1) / (m + p - 1) | p - k |
| `Eager1F1B` | 1 | (p - 1) / (m + p - 1) | 2 (p - k) - 1 |
| `Interleaved1F1B` | v | (p - 1) / (v m + p - 1) | (v - 1) p + 2 (p - k) - 1, of stages |
| `ZBVZeroBubble` | 2 | (p - 1) / (6 m + p - 1) | 2 p, of stages |

Sources: GPipe (Huang et al., NeurIPS 2019), 1F1B (PipeDream, Narayanan et al., SOSP 2019),
interleaved 1F1B (Narayanan et al., SC 2021, section 2.2), eager 1F1B (Zhuang et al., "On optimizing
the communication of model parallelism", MLSys 2023), ZB-V (Qi et al., "Zero bubble pipeline
parallelism", ICLR 2024, section 6). Names are those of torch's `get_schedule_class`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from haiscale.pipeline.actions import Action, Kind, Schedule, ScheduleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["NAMES", "build", "eager_1f1b", "gpipe", "interleaved_1f1b", "one_f_one_b", "zb_v"]


def build(name: str, *, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """The schedule of this name: one of `NAMES`, in upper or lower case.

    Args:
        name: Name of the schedule.
        ranks: Number of pipeline ranks, p.
        microbatches: Number of micro-batches of a step, m.
        stages_per_rank: Number of stages on each rank, v. Only interleaved schedules use it; the
            number of stages of `ZBVZeroBubble` is always two per rank.

    Raises:
        ScheduleError: The name is unknown, or the sizes do not fit the schedule.
    """
    known = {each.lower(): each for each in NAMES}
    chosen = known.get(name.lower())
    if chosen is None:
        raise ScheduleError(f"unknown schedule {name!r}", f"choose one of {', '.join(NAMES)}")
    if chosen == "Interleaved1F1B":
        return interleaved_1f1b(ranks, microbatches, stages_per_rank)
    expected = 2 if chosen == "ZBVZeroBubble" else 1
    if stages_per_rank not in {1, expected}:
        raise ScheduleError(
            f"{chosen} has {expected} stages on each rank, not {stages_per_rank}",
            f"set stages_per_rank to {expected}, or choose Interleaved1F1B",
        )
    return _BUILDERS[chosen](ranks, microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes."""
    return _one_stage("GPipe", ranks, microbatches, lambda _: microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward and one backward pass in turn, with as few micro-batches in flight as possible.

    A transfer between two stages delays both: the stage before computes its next forward pass only
    after the gradient of an earlier one has arrived.
    """
    return _one_stage("1F1B", ranks, microbatches, lambda rank: ranks - rank)


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with forward passes earlier by one slot for each later stage.

    An activation is sent one slot before the next stage needs it, and a gradient arrives one slot
    before this stage needs it, so that a transfer of up to one forward pass delays nothing. The
    price is up to twice the activations.
    """
    return _one_stage("Eager1F1B", ranks, microbatches, lambda rank: 2 * (ranks - rank) - 1)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """1F1B over several stages of each rank: rank r has the stages r, r + p, r + 2 p and so on.

    Micro-batches pass through in rounds of p. The last stage of a round sends to the first rank, so
    each micro-batch takes v - 1 more transfers around the pipeline.
    """
    name, chunks = "Interleaved1F1B", stages_per_rank
    _refuse_sizes(name, ranks, microbatches, ranks)
    if chunks < 1:
        raise ScheduleError(f"{name}: {chunks} stages per rank", "set stages_per_rank to 2 or more")
    if microbatches % ranks:
        more = microbatches + -microbatches % ranks
        raise ScheduleError(
            f"{name}: {microbatches} micro-batches do not divide into rounds of {ranks}, one for "
            "each rank",
            f"use {more} micro-batches, or a schedule with one stage per rank",
        )
    total = microbatches * chunks

    def pass_of(rank: int, kind: Kind, number: int) -> Action:
        """The forward or backward pass with this number in a rank's order."""
        round_number, place = divmod(number, ranks * chunks)
        chunk, offset = divmod(place, ranks)
        if kind is Kind.BACKWARD:
            chunk = chunks - 1 - chunk
        return Action(chunk * ranks + rank, kind, round_number * ranks + offset)

    def actions(rank: int) -> Iterable[Action]:
        ahead = min(total, (chunks - 1) * ranks + 2 * (ranks - 1 - rank))
        for number in range(total + ahead):
            if number < total:
                yield pass_of(rank, Kind.FORWARD, number)
            if number >= ahead:
                yield pass_of(rank, Kind.BACKWARD, number - ahead)

    rows = tuple(tuple(actions(rank)) for rank in range(ranks))
    return Schedule(name, ranks * chunks, microbatches, rows)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble in the shape of a V: rank r has the stages r and 2 p - 1 - r.

    The backward pass is split; gradients of weights fill what would be bubbles at the end. There is
    no bubble inside a rank if forward pass and both parts of backward take equal time. The first
    and the last stage are on rank 0, so tied embeddings need no transfer.
    """
    name = "ZBVZeroBubble"
    _refuse_sizes(name, ranks, microbatches, 2 * ranks - 1)

    def actions(rank: int) -> Iterable[Action]:
        counts: Counter[str] = Counter()
        # Cells are kind and chunk: chunk 0 is the way down the V, chunk 1 the way back.
        left = ranks - rank
        phases: Sequence[tuple[str, int]] = (
            ("F0", 2 * left - 1),
            ("F1 F0", rank),
            ("F1 I1 W1", left),
            ("F0 I0 W0 F1 I1 W1", microbatches - ranks - left + 1),
            ("I0 W0 F1 I1 W1", left - 1),
            ("I0 I1", rank),
            ("I0 W0", left),
            ("W1", rank),
            ("W0", rank),
        )
        for cells, times in phases:
            for cell in cells.split() * times:
                stage = rank if cell[1] == "0" else 2 * ranks - 1 - rank
                yield Action(stage, Kind(cell[0]), counts[cell])
                counts[cell] += 1

    rows = tuple(tuple(actions(rank)) for rank in range(ranks))
    return Schedule(name, 2 * ranks, microbatches, rows)


def _one_stage(
    name: str, ranks: int, microbatches: int, in_flight: Callable[[int], int]
) -> Schedule:
    """Rank r has stage r, and at most `in_flight(r)` micro-batches before their backward pass."""
    _refuse_sizes(name, ranks, microbatches, ranks)

    def actions(rank: int) -> Iterable[Action]:
        ahead = min(in_flight(rank), microbatches) - 1
        for number in range(microbatches + ahead):
            if number < microbatches:
                yield Action(rank, Kind.FORWARD, number)
            if number >= ahead:
                yield Action(rank, Kind.BACKWARD, number - ahead)

    rows = tuple(tuple(actions(rank)) for rank in range(ranks))
    return Schedule(name, ranks, microbatches, rows)


def _refuse_sizes(name: str, ranks: int, microbatches: int, least: int) -> None:
    if ranks < 1:
        raise ScheduleError(f"{name}: {ranks} ranks", "use 1 rank or more")
    if microbatches < least:
        raise ScheduleError(
            f"{name}: {microbatches} micro-batches do not fill {ranks} ranks, which need at least "
            f"{least}",
            f"use {least} micro-batches or more, or fewer ranks",
        )


_BUILDERS: Final[dict[str, Callable[[int, int], Schedule]]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "Eager1F1B": eager_1f1b,
    "ZBVZeroBubble": zb_v,
}
NAMES: Final = (*_BUILDERS, "Interleaved1F1B")
"""Names of the schedules."""

"""Actions of a pipeline schedule in torch's vocabulary, as plain data.

A schedule is a list of actions for each rank of the pipeline. ``2F0`` is the forward pass of stage
2 for micro-batch 0. ``B`` is its backward pass; ``I`` and ``W`` are the two parts of a split one:
the gradient of the stage's input, which the stage before waits for, and those of its weights, which
nothing waits for. Transfers are not part of a schedule: they follow from the order of the actions.

CSV is torch's format: one row for each rank, one action in each cell; empty cells are skipped.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Action", "Kind", "Schedule", "ScheduleError", "from_csv", "to_csv"]

_ACTION: Final = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_TOGETHER: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_ADDED: Final = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}) | {
    f"{verb}_{way}" for verb in ("SEND", "RECV", "WAIT_SEND") for way in "FB"
}


class Kind(StrEnum):
    """The computation of an action; the values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """First part of a split backward pass: the gradient of the stage's input."""
    WEIGHT = "W"
    """Second part of a split backward pass: the gradients of the stage's weights."""


class Action(NamedTuple):
    """One computation of one stage for one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """As in torch's CSV: ``2F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


class ScheduleError(ValueError):
    """A schedule that cannot be built or run; `problem` and `remedy` state why and what to change.

    `rank`, `stage` and `microbatch` are None where the problem is not one of a single rank, stage
    or micro-batch.
    """

    def __init__(
        self,
        problem: str,
        remedy: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem
        self.remedy = remedy
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each rank of a pipeline, in the order in which the rank executes them."""

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in ascending order."""
        return tuple(sorted({action.stage for action in self.ranks[rank]}))

    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage; -1 for a stage without actions."""
        ranks = [-1] * self.stages
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                ranks[action.stage] = rank
        return tuple(ranks)

    def digest(self) -> str:
        """Of everything that ranks must agree on, 16 hexadecimal digits."""
        text = f"{self.stages} {self.microbatches}\n{to_csv(self)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_csv(schedule: Schedule) -> str:
    """The schedule as torch's CSV of computations (`compute_only`)."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([str(action) for action in actions] for actions in schedule.ranks)
    return file.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """A schedule from torch's CSV of computations. `check.check` validates what it contains.

    Actions that torch overlaps (``(0F4;3B0)OVERLAP_F_B``) are executed one after the other.

    Raises:
        ScheduleError: A cell is not an action, or is one that lowering adds (``SEND_F``, …).
    """
    rows = [
        tuple(action for cell in row for action in _actions(cell, rank))
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    ]
    every = [action for row in rows for action in row]
    if not every:
        raise ScheduleError(
            f"schedule {name!r} has no actions", "write one row of actions for each rank"
        )
    stages = 1 + max(action.stage for action in every)
    microbatches = 1 + max(action.microbatch for action in every)
    return Schedule(name, stages, microbatches, tuple(rows))


def _actions(cell: str, rank: int) -> Iterator[Action]:
    text = cell.strip()
    if together := _TOGETHER.fullmatch(text):
        for part in together[1].split(";"):
            yield from _actions(part, rank)
        return
    if not text:
        return
    match = _ACTION.fullmatch(text)
    if match and match[2] in _ADDED:
        raise ScheduleError(
            f"rank {rank}: {text!r} is added to a schedule when it is lowered",
            'write the computations only (torch: _dump_csv(file, format="compute_only"))',
            rank=rank,
        )
    if match is None or match[2] not in set(Kind) or not match[3]:
        raise ScheduleError(
            f"rank {rank}: invalid action {text!r}",
            "write stage, F, B, I or W, and micro-batch, for example 2F0",
            rank=rank,
        )
    yield Action(int(match[1]), Kind(match[2]), int(match[3]))

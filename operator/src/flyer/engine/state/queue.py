"""The queue as a value: waiting jobs in order and by equivalence class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flyer.engine.state.preemption_limits import Limits
    from flyer.engine.state.quotas import Quota


class QueuePosition(NamedTuple):
    """Sort key of a waiting job; the priority level comes first, the highest level first."""

    negated_level: int
    turn_at: float
    submitted_at: float
    job: str

    @property
    def level(self) -> int:
        """Priority level at which the job waits."""
        return -self.negated_level

    def at_level(self, level: int) -> QueuePosition:
        """The position that the job has at another priority level."""
        return self._replace(negated_level=-level)


# A position in the queue, and the key of the job there.
Contender = tuple[QueuePosition, str]
ClassKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Basis:
    """Inputs of the classes other than the jobs: limits by priority, quotas and teams."""

    limits: Limits
    quotas: tuple[Quota, ...] = ()
    teams: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A waiting job: its position, and its class; None: it is placed individually."""

    contender: Contender
    class_key: ClassKey | None
    # When it joins a class, because it stops waiting for the zone layout of its checkpoint.
    joins_at: float | None = None


@dataclass(frozen=True, slots=True)
class Queue:
    """An immutable value; `updated_queue` returns a new one."""

    basis: Basis
    entries: Mapping[str, Entry] = field(default_factory=dict)
    order: Sequence[Contender] = ()
    classes: Mapping[ClassKey, Sequence[Contender]] = field(default_factory=dict)
    # The jobs without a class, in order, and the jobs without a stored reason.
    single: Sequence[Contender] = ()
    unexplained: frozenset[str] = frozenset()
    # The reasons of a long queue are updated in turn: up to this position, at this time.
    explained_to: Contender | None = None
    explained_at: float | None = None


__all__ = ["Basis", "ClassKey", "Contender", "Entry", "Queue"]

"""The queue as a value: waiting jobs in order and by equivalence class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flyer.engine.state.preemption_limits import Limits
    from flyer.engine.state.quotas import Quota

# A place in the queue, and the job there.
Contender = tuple[tuple[int, float, float, str], str]
ClassKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Basis:
    """What classes depend on besides the jobs: caps by priority, and who counts in which quota."""

    limits: Limits
    quotas: tuple[Quota, ...] = ()
    teams: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A waiting job: its place, and its class; None: it is looked at by itself."""

    contender: Contender
    class_key: ClassKey | None
    # When it joins a class: it does not wait for the split of its checkpoint any longer.
    joins_at: float | None = None


@dataclass(frozen=True, slots=True)
class Queue:
    """A value: `updated` returns a new one."""

    basis: Basis
    entries: Mapping[str, Entry] = field(default_factory=dict)
    order: Sequence[Contender] = ()
    classes: Mapping[ClassKey, Sequence[Contender]] = field(default_factory=dict)
    # The jobs without a class, in order, and those to which no reason was written yet.
    single: Sequence[Contender] = ()
    unexplained: frozenset[str] = frozenset()
    # The reasons of a long queue are looked at in turn: up to where, and when.
    explained_to: Contender | None = None
    explained_at: float | None = None


__all__ = ["Basis", "ClassKey", "Contender", "Entry", "Queue"]

"""The queue: jobs that wait for nodes, in order and by equivalence class, kept between plans.

Jobs of one class want the same nodes and count in the same quotas, so that where the first of them
finds none the others find none either: a plan looks at classes, not at jobs (Borg, EuroSys 2015,
section 3.4). What the queue holds follows from the jobs alone; it is brought up to date with those
that changed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flyer.api import Phase, Priority
from flyer.api.waiting import PENDING_EVALUATION, PODS_REFUSED
from flyer.engine import quotas
from flyer.engine.asks import is_crash_looping, zone_layout_deadline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from flyer.engine.draft import CycleState
    from flyer.engine.limits import Limits
    from flyer.engine.quotas import Quota
    from flyer.engine.state import JobState

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


def updated(cycle: CycleState) -> Queue:
    """The queue as the jobs of this step make it."""
    known, limits = cycle.queue, quotas.valid(cycle)
    # Without limits nobody's team counts.
    basis = Basis(cycle.zones.limits, limits, cycle.teams if limits else {})
    if known is None or known.basis != basis:
        turn = (None, None) if known is None else (known.explained_to, known.explained_at)
        known = Queue(basis, explained_to=turn[0], explained_at=turn[1])
        stale: Iterable[str] = cycle.jobs
    else:
        due = [
            key
            for _, key in known.single
            if (joins_at := known.entries[key].joins_at) is not None and joins_at <= cycle.now
        ]
        stale = {**cycle.queue_changes, **dict.fromkeys(due)}
        if not stale:
            return known
    cycle.queue = _Update(cycle, known).of(stale)
    cycle.queue_changes.clear()
    return cycle.queue


class _Update:
    """Copies what changes: a queue that was read before keeps its value."""

    def __init__(self, cycle: CycleState, known: Queue) -> None:
        self._cycle = cycle
        self._known = known
        self._entries = dict(known.entries)
        self._classes = dict(known.classes)
        self._lists: dict[ClassKey, list[Contender]] = {}
        self._order = list(known.order)
        self._single = list(known.single)
        self._unexplained = set(known.unexplained)
        self._accounts: dict[tuple[object, ...], tuple[tuple[str, str], ...]] = {}

    def of(self, keys: Iterable[str]) -> Queue:
        many = not self._known.entries
        changed = False
        for key in keys:
            self._cycle.current_job = key
            job = self._cycle.jobs.get(key)
            waits = job is not None and job.status.phase is Phase.QUEUED and not job.removed
            entry = self._entry(job) if job is not None and waits else None
            changed = self._replace(key, entry, sort=not many) or changed
            self._unexplained.discard(key)
            if entry is not None and job is not None and _is_unexplained(job):
                self._unexplained.add(key)
        self._cycle.current_job = ""
        if many:
            for contenders in (self._order, self._single, *self._lists.values()):
                contenders.sort()
        unexplained = frozenset(self._unexplained)
        if not changed:
            if unexplained == self._known.unexplained:
                return self._known
            return replace(self._known, unexplained=unexplained)
        for class_key, members in self._lists.items():
            self._classes[class_key] = members
            if not members:
                del self._classes[class_key]
        return replace(
            self._known, entries=self._entries, order=self._order, classes=self._classes,
            single=self._single, unexplained=unexplained,
        )  # fmt: skip

    def _replace(self, key: str, entry: Entry | None, *, sort: bool) -> bool:
        before = self._entries.get(key)
        if before == entry:
            return False
        if before is not None:
            del self._entries[key]
            _take_out(self._order, before.contender)
            _take_out(self._members(before.class_key), before.contender)
        if entry is not None:
            self._entries[key] = entry
            for contenders in (self._order, self._members(entry.class_key)):
                if sort:
                    insort(contenders, entry.contender)
                else:
                    contenders.append(entry.contender)
        return True

    def _members(self, class_key: ClassKey | None) -> list[Contender]:
        if class_key is None:
            return self._single
        if class_key not in self._lists:
            self._lists[class_key] = list(self._classes.get(class_key, ()))
        return self._lists[class_key]

    def _entry(self, job: JobState) -> Entry:
        cycle, history, left = self._cycle, job.status.history, job.status.eviction
        levels = self._levels_of(job)
        if levels:  # it is looked at on its highest level first
            cycle.auto_priorities[job.key] = levels[0]
        contender = (cycle.queue_position(job), job.key)
        alone = (
            history.submitted_at is None  # its place moves with the time
            or history.not_before is not None
            or bool(job.status.occupied)
            or (left is not None and left.reason == PODS_REFUSED)
        )
        if alone:
            return Entry(contender, None)
        joins_at = zone_layout_deadline(cycle, job)
        if joins_at is not None:
            return Entry(contender, None, joins_at)
        spec = job.spec
        remembers = bool(history.previous or history.avoid)
        class_key = (
            *needs_of(cycle, job), spec.nodes, spec.node_class, spec.zone, remembers,
            self._accounts_of(job), self._lower_levels_of(job, levels),
        )  # fmt: skip
        return Entry(contender, class_key)

    def _levels_of(self, job: JobState) -> list[Priority]:
        """Those of an `auto` job while limits apply, the highest first; else none."""
        limits = self._known.basis.quotas
        if not limits or job.spec.priority is not Priority.AUTO:
            return []
        return quotas.priorities(self._cycle, job, limits)

    def _lower_levels_of(self, job: JobState, levels: list[Priority]) -> tuple[object, ...]:
        """What counts of the job at the levels that it comes to where there is no room above."""
        if not levels:
            return ()
        cycle, found = self._cycle, []
        for level in levels:
            cycle.auto_priorities[job.key] = level
            found.append((level, cycle.terms(job), self._accounts_of(job)))
        cycle.auto_priorities[job.key] = levels[0]
        return tuple(found)

    def _accounts_of(self, job: JobState) -> tuple[tuple[str, str], ...]:
        """Where nodes of the job may count, whatever class of nodes they are."""
        limits = self._known.basis.quotas
        if not limits:
            return ()
        subjects = quotas.subjects_of(job, self._known.basis.teams)
        priority = self._cycle.priority(job)
        wanted = (subjects, priority)
        if wanted not in self._accounts:
            self._accounts[wanted] = tuple(
                limit.account(subjects)
                for limit in limits
                if limit.concerns(subjects) and limit.priority in (quotas.ANY, priority.value)
            )
        return self._accounts[wanted]


def needs_of(cycle: CycleState, job: JobState) -> tuple[object, ...]:
    """What decides which nodes a job may have, but for how many and for what it remembers."""
    spec = job.spec
    return (
        cycle.level(job), spec.node_class, spec.zone, spec.ranks_per_node, spec.cross_zone,
        spec.active_deadline, cycle.terms(job), is_crash_looping(cycle, job),
    )  # fmt: skip


def _take_out(contenders: list[Contender], one: Contender) -> None:
    at = bisect_left(contenders, one)
    assert contenders[at] == one, f"{one[1]}: not in the queue at its place"
    del contenders[at]


def _is_unexplained(job: JobState) -> bool:
    pending = job.status.pending
    return pending is None or pending.reason == PENDING_EVALUATION


@dataclass(slots=True)
class _Cursor:
    """How far a walk has come among contenders that are in order."""

    class_key: ClassKey | None
    members: Sequence[Contender]
    at: int = 0
    level: int | None = None  # in place of the members' own

    @property
    def next(self) -> Contender:
        place, key = self.members[self.at]
        return (place if self.level is None else (-self.level, *place[1:])), key


class Walk:
    """One way through the queue, the first in place first. Whole classes can be left out."""

    def __init__(self, queue: Queue, others: Iterable[Contender]) -> None:
        self._heap: list[tuple[Contender, _Cursor]] = []
        self._last: _Cursor | None = None
        cursors = [_Cursor(class_key, members) for class_key, members in queue.classes.items()]
        cursors.append(_Cursor(None, queue.single))
        cursors += [_Cursor(None, (other,)) for other in others]
        self._heap = [(cursor.next, cursor) for cursor in cursors if cursor.members]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[tuple[Contender, ClassKey | None]]:
        while True:
            if self._last is not None:
                self._push(self._last)
                self._last = None
            if not self._heap:
                return
            contender, cursor = heapq.heappop(self._heap)
            cursor.at += 1
            self._last = cursor
            yield contender, cursor.class_key

    def put(self, contender: Contender) -> None:
        """Somebody who is not in the queue at this place."""
        self._push(_Cursor(None, (contender,)))

    def lower(self, level: int) -> None:
        """The last one and the rest of its class take their places at this level."""
        assert self._last is not None, "no class"
        self._last.at -= 1
        self._last.level = level

    def skip(self) -> None:
        """Leave out the rest of the class of the last one."""
        self._last = None

    def _push(self, cursor: _Cursor) -> None:
        if cursor.at < len(cursor.members):
            heapq.heappush(self._heap, (cursor.next, cursor))


__all__ = ["Basis", "ClassKey", "Contender", "Entry", "Queue", "Walk", "needs_of", "updated"]

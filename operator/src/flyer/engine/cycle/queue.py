"""The queue of a scheduling pass: its update between passes, and the walk through it.

Jobs of one class require the same nodes and count in the same quotas: if the first of them gets no
nodes, the others get none either. A scheduling pass therefore visits classes instead of jobs (Borg,
EuroSys 2015, section 3.4). The queue depends only on the jobs, is kept between passes, and is
updated with the jobs that changed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flyer.api import Phase, Priority
from flyer.api.waiting import PENDING_EVALUATION, PODS_REFUSED
from flyer.engine.placement.node_selection import needs_of, zone_layout_deadline
from flyer.engine.quota import admission
from flyer.engine.quota.snapshot import active_quotas, subjects_of
from flyer.engine.scheduling_policy import queue_position
from flyer.engine.state.queue import Basis, ClassKey, Contender, Entry, Queue
from flyer.engine.state.quotas import ANY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


def updated_queue(cycle: CycleState) -> Queue:
    """The queue, updated with the jobs that changed in this step."""
    previous, limits = cycle.queue, active_quotas(cycle)
    # Without quotas, teams have no effect.
    basis = Basis(cycle.zones.limits, limits, cycle.teams if limits else {})
    if previous is None or previous.basis != basis:
        turn = (None, None) if previous is None else (previous.explained_to, previous.explained_at)
        previous = Queue(basis, explained_to=turn[0], explained_at=turn[1])
        stale: Iterable[str] = cycle.jobs
    else:
        due_jobs = [
            key
            for _, key in previous.single
            if (joins_at := previous.entries[key].joins_at) is not None and joins_at <= cycle.now
        ]
        stale = {**cycle.queue_changes, **dict.fromkeys(due_jobs)}
        if not stale:
            return previous
    cycle.queue = _Update(cycle, previous).of(stale)
    cycle.queue_changes.clear()
    return cycle.queue


class _Update:
    """Builds the next queue and copies what changes, because a queue is immutable."""

    def __init__(self, cycle: CycleState, queue: Queue) -> None:
        self._cycle = cycle
        self._known = queue
        self._entries = dict(queue.entries)
        self._classes = dict(queue.classes)
        self._lists: dict[ClassKey, list[Contender]] = {}
        self._order = list(queue.order)
        self._single = list(queue.single)
        self._unexplained = set(queue.unexplained)
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
        cycle, history, eviction = self._cycle, job.status.history, job.status.eviction
        levels = self._levels_of(job)
        if levels:  # the highest level is tried first
            cycle.auto_priorities[job.key] = levels[0]
        contender = (queue_position(cycle, job), job.key)
        alone = (
            history.submitted_at is None  # its position changes with time
            or history.not_before is not None
            or bool(job.status.occupied)
            or (eviction is not None and eviction.reason == PODS_REFUSED)
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
        """Allowed priorities of an `auto` job while quotas apply, the highest first."""
        limits = self._known.basis.quotas
        if not limits or job.spec.priority is not Priority.AUTO:
            return []
        return admission.allowed_priorities(self._cycle, job, limits)

    def _lower_levels_of(self, job: JobState, levels: list[Priority]) -> tuple[object, ...]:
        """Terms and accounts of the job at each level; a full level leads to the next lower one."""
        if not levels:
            return ()
        cycle, lower_levels = self._cycle, []
        for level in levels:
            cycle.auto_priorities[job.key] = level
            lower_levels.append((level, cycle.terms(job), self._accounts_of(job)))
        cycle.auto_priorities[job.key] = levels[0]
        return tuple(lower_levels)

    def _accounts_of(self, job: JobState) -> tuple[tuple[str, str], ...]:
        """Accounts in which nodes of the job may count, for any node class."""
        limits = self._known.basis.quotas
        if not limits:
            return ()
        subjects = subjects_of(job, self._known.basis.teams)
        priority = self._cycle.priority(job)
        account_key = (subjects, priority)
        if account_key not in self._accounts:
            self._accounts[account_key] = tuple(
                limit.account(subjects)
                for limit in limits
                if limit.concerns(subjects) and limit.priority in (ANY, priority.value)
            )
        return self._accounts[account_key]


def _take_out(contenders: list[Contender], contender: Contender) -> None:
    at = bisect_left(contenders, contender)
    assert contenders[at] == contender, f"{contender[1]}: not in the queue at its place"
    del contenders[at]


def _is_unexplained(job: JobState) -> bool:
    pending = job.status.pending
    return pending is None or pending.reason == PENDING_EVALUATION


@dataclass(slots=True)
class _Cursor:
    """Position of a walk in a sorted list of contenders."""

    class_key: ClassKey | None
    members: Sequence[Contender]
    at: int = 0
    level: int | None = None  # instead of the members' level

    @property
    def next(self) -> Contender:
        place, key = self.members[self.at]
        return (place if self.level is None else place.at_level(self.level)), key


class Walk:
    """Iterator over the queue in order; `skip` leaves out the rest of a class."""

    def __init__(self, queue: Queue, contenders: Iterable[Contender]) -> None:
        self._heap: list[tuple[Contender, _Cursor]] = []
        self._last: _Cursor | None = None
        cursors = [_Cursor(class_key, members) for class_key, members in queue.classes.items()]
        cursors.append(_Cursor(None, queue.single))
        cursors += [_Cursor(None, (other,)) for other in contenders]
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
        """Add a contender at a position at which the queue does not have it."""
        self._push(_Cursor(None, (contender,)))

    def lower(self, level: int) -> None:
        """Move the last contender and the rest of its class to this level."""
        assert self._last is not None, "no class"
        self._last.at -= 1
        self._last.level = level

    def skip(self) -> None:
        """Skip the rest of the class of the last contender."""
        self._last = None

    def _push(self, cursor: _Cursor) -> None:
        if cursor.at < len(cursor.members):
            heapq.heappush(self._heap, (cursor.next, cursor))


__all__ = ["Walk", "updated_queue"]

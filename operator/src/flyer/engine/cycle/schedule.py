"""Scheduling pass: gives nodes to waiting jobs in the order of the queue.

For each waiting job: can it ever run; do free nodes suffice; do the nodes of cheaper jobs suffice;
if not, which nodes does it reserve. A job behind a blocked one is started (backfill) only on nodes
that are not reserved, or if it releases them in time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine.cycle.allocate import allocate
from flyer.engine.cycle.queue import Walk, updated_queue
from flyer.engine.explain import pending_reasons
from flyer.engine.explain.pending_reasons import PendingReasonCache
from flyer.engine.explain.pending_writer import PendingWriter
from flyer.engine.placement.availability import NodeAvailability
from flyer.engine.placement.node_selection import needs_of, node_requirements, zone_layout_deadline
from flyer.engine.placement.reservations import Reservation, reservation_for
from flyer.engine.quota.admission import QuotaAdmission
from flyer.engine.scheduling_policy import in_refusal_cooldown, queue_position
from flyer.engine.state import transitions
from flyer.engine.state.jobs import WAITING, JobState

if TYPE_CHECKING:
    from flyer.api import Pending
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.queue import ClassKey, Contender

# Blocked jobs that have a backfill reservation. The others wait without one until they are among
# the first of the queue.
_RESERVATIONS_MAX = 16
# Jobs at the head of the queue that are visited one by one. Behind them the rest of a class is
# skipped once no nodes can be found for it, and its reasons are written in turn.
_HEAD_JOBS = 32
# Jobs of one user that could run and get no nodes: jobs behind them are not visited. As many jobs
# of the user that cannot run now, or ever, are visited in addition.
_USER_JOBS_MAX = 256
_EXPLAINED_PER_SECOND = 20
_EXPLAINED_MAX = 256


def schedule(cycle: CycleState) -> list[Reservation]:
    """Give nodes to every waiting job that may have them; return the reservations of the others."""
    return _planned(cycle).reservations


def schedule_and_start(cycle: CycleState) -> None:
    """Schedule the waiting jobs, and start each job whose nodes are all empty."""
    _start_ready_jobs(cycle, _planned(cycle).availability)


def _planned(cycle: CycleState) -> _SchedulingPass:
    plan = _SchedulingPass(cycle)
    plan.run()
    cycle.current_job = ""
    return plan


class _SchedulingPass:
    """One pass over the queue."""

    def __init__(self, cycle: CycleState) -> None:
        self._cycle = cycle
        self.availability = NodeAvailability(cycle)
        self._admission = QuotaAdmission(self.availability)
        self._queue = updated_queue(cycle)
        self._walk = Walk(self._queue, self._leaving())
        self.reservations: list[Reservation] = []
        self._blocked: dict[tuple[object, ...], JobState] = {}  # the smallest job that got no nodes
        # The job behind which the rest of a class waits, at each level.
        self._ahead: dict[tuple[ClassKey, int], JobState] = {}
        self._search = UnschedulableNeeds(self.availability)
        self._reasons = PendingReasonCache(self.availability)
        self._verdicts: dict[tuple[object, ...], Pending | None] = {}
        self._pending_writer = PendingWriter(self.availability)
        self._waiting = 0  # visited, and not placed
        # Jobs that could run and got no nodes, by user, and jobs behind too many of their user.
        self._looks: Counter[str] = Counter()
        self._ineligible_looks: Counter[str] = Counter()
        self._behind_own: set[str] = set()
        self._placed: list[Contender] = []
        self._skipping = False

    def _leaving(self) -> list[Contender]:
        """Preempted jobs that have not left their nodes yet: they keep their position."""
        return [
            (queue_position(self._cycle, job), job.key)
            for job in self._cycle.active_jobs().values()
            if job.status.suspension is not None
            and job.status.suspension.reason == "Preempted"
            and not job.suspend
        ]

    def run(self) -> None:
        cycle = self._cycle
        visited = set()
        for (place, key), class_key in self._walk:
            job = cycle.jobs[key]
            cycle.current_job = key
            if job.status.phase is Phase.SUSPENDING:
                self.reservations += self._reserve_for_backfill(job)
                continue
            if key not in visited:  # else it is an `auto` job at its next level
                if self._looks[job.user] >= _USER_JOBS_MAX:
                    self._behind_own.add(key)
                    self._skipping = True
                    continue
                if _is_never(job) and self._ineligible_looks[job.user] >= _USER_JOBS_MAX:
                    self._skipping = True  # its verdict is renewed in turn, with the other reasons
                    continue
                self._looks[job.user] += 1
                visited.add(key)
                self._admission.enter(job, place.level)
            ends = self._try_job(job, class_key)
            if ends and class_key is not None and self._waiting >= _HEAD_JOBS:
                self._walk.skip()
                self._skipping = True
        self._explain(visited)
        self._pending_writer.close()

    def _try_job(self, job: JobState, class_key: ClassKey | None) -> bool:
        """Place the job, or report why not; return whether the same holds for its class."""
        barred = self._ineligibility(job)
        if barred is not None:
            if self._ineligible_looks[job.user] < _USER_JOBS_MAX:
                self._ineligible_looks[job.user] += 1
                self._looks[job.user] -= 1  # no job waits for it
            self._report(job, barred)
            return True
        if self._admission.lower(job):  # `auto`: no room at this level; the next one is tried
            if class_key is None:
                self._walk.put((queue_position(self._cycle, job), job.key))
            else:  # jobs of the same class find no more room
                self._walk.lower(self._cycle.level(job))
            return False
        out = self._admission.refusal(job)
        if out is not None:
            self._report(job, out)
            return True
        requirements = self._needs(job)
        ahead = self._blocked.get(requirements)
        if ahead is not None and ahead.spec.nodes <= job.spec.nodes:
            if class_key is not None:
                self._ahead.setdefault((class_key, self._cycle.level(job)), ahead)
            self._admission.fill(job)
            self._report(job, _behind(self._cycle, job, ahead))
            return not self._admission.charges(job)
        if not self._search.is_unschedulable(job, requirements) and allocate(
            self.availability, job, self.reservations, self._admission
        ):
            self._blocked.clear()
            self._search.clear()
            self._reasons.clear()
            self._pending_writer.placed()
            self._placed.append((queue_position(self._cycle, job), job.key))
            self._looks[job.user] -= 1
            self._admission.fill(job)
            return False
        return self._handle_unplaced(job, requirements, class_key)

    def _handle_unplaced(
        self, job: JobState, requirements: tuple[object, ...], class_key: ClassKey | None
    ) -> bool:
        """Reserve nodes for a job that got none; return whether the rest of its class gets none."""
        self._search.failed(job, requirements)
        own: list[Reservation] = []
        if not in_refusal_cooldown(
            self._cycle, job
        ):  # no job waits for one whose pods were refused
            self._blocked[requirements] = job
            own = self._reserve_for_backfill(job)
            self.reservations += own
        self._admission.fill(job)  # from here on its share counts
        eta = own[0].needed_at if own and math.isfinite(own[0].needed_at) else None
        self._report(job, self._reasons.of(job, self.reservations, own, eta))
        if requirements[
            -1
        ]:  # others have other placement histories: they do not wait behind this one
            ends = not own and self._search.is_unschedulable(job, requirements)
        else:
            ends = True
            if class_key is not None:
                self._ahead.setdefault((class_key, self._cycle.level(job)), job)
        return ends and not self._admission.charges(job)

    def _ineligibility(self, job: JobState) -> Pending | None:
        """Why the job cannot be placed whatever nodes are free: not yet, or never."""
        paused = _pause(self._cycle, job)
        if paused is not None:
            return paused
        shape = _shape(job)
        if shape not in self._verdicts:
            self._verdicts[shape] = pending_reasons.infeasible(self.availability, job)
        return self._verdicts[shape] or self._admission.never(job)

    def _needs(self, job: JobState) -> tuple[object, ...]:
        """Of two jobs with equal needs, the one with more nodes is blocked if the other one is."""
        history = job.status.history
        alone = job.key if history.previous or history.avoid else ""  # it has a placement history
        admitted = None  # without quotas all
        if self._admission.limited:
            admitted = tuple(
                nodes[0].node_class
                for nodes in self.availability.classes(job)
                if self._admission.admits(job, nodes[0].node_class)
            )
        return needs_of(self._cycle, job), admitted, alone

    def _reserve_for_backfill(self, job: JobState) -> list[Reservation]:
        if len(self.reservations) >= _RESERVATIONS_MAX:
            return []
        if job.status.phase is Phase.SUSPENDING:  # its quotas count its nodes already
            reservation = reservation_for(self.availability, job, self.reservations)
        else:
            reservation = reservation_for(
                self.availability,
                job,
                self.reservations,
                lambda chosen_nodes: self._admission.admits(job, chosen_nodes),
            )
        return [] if reservation is None else [reservation]

    def _report(self, job: JobState, pending: Pending) -> None:
        self._waiting += 1
        position = self._waiting
        if self._skipping:
            position = self._position((queue_position(self._cycle, job), job.key))
        self._pending_writer.set(job, pending, position, self.reservations)

    def _position(self, contender: Contender) -> int:
        """Position among the jobs without nodes, from 1."""
        ahead = bisect_left(self._queue.order, contender) - bisect_left(self._placed, contender)
        return ahead + 1

    def _explain(self, visited: set[str]) -> None:
        """Report why skipped jobs wait: new ones immediately, the others in turn."""
        cycle, entries = self._cycle, self._queue.entries
        new = sorted(self._queue.unexplained, key=lambda key: entries[key].contender)
        explained = [cycle.explained_job] if cycle.explained_job in entries else []
        for key in dict.fromkeys([*explained, *new, *self._in_turn()]):
            if key not in visited:
                cycle.current_job = key
                job, entry = cycle.jobs[key], entries[key]
                self._admission.enter(job)
                while self._admission.lower(job):
                    pass
                why = self._why(job, entry.class_key)
                self._pending_writer.set(
                    job, why, self._position(entry.contender), self.reservations
                )

    def _in_turn(self) -> list[str]:
        """The next jobs of the queue, a fixed number per second."""
        queue, now = self._queue, self._cycle.now
        count = _EXPLAINED_MAX
        if queue.explained_at is not None:
            count = min(count, int((now - queue.explained_at) * _EXPLAINED_PER_SECOND))
        if count == 0:
            return []
        to = queue.explained_to
        start = 0 if to is None else bisect_right(queue.order, to)
        entries_in_turn = queue.order[start : start + count]
        to = entries_in_turn[-1] if start + count < len(queue.order) else None
        self._cycle.queue = replace(queue, explained_to=to, explained_at=now)
        return [key for _, key in entries_in_turn]

    def _why(self, job: JobState, class_key: ClassKey | None) -> Pending:
        barred = self._ineligibility(job)
        if barred is not None:
            return barred
        if job.key in self._behind_own:
            return pending_reasons.behind_own_jobs(job, _USER_JOBS_MAX)
        out = self._admission.refusal(job)
        if out is not None:
            return out
        level = self._cycle.level(job)
        if class_key is not None and (class_key, level) in self._ahead:
            return _behind(self._cycle, job, self._ahead[class_key, level])
        return self._reasons.of(job, self.reservations, (), None)


class UnschedulableNeeds:
    """Requirements for which no nodes were found since the last allocation.

    The placement history of a job (the last part of its needs) decides which nodes it gets, but not
    whether it gets any. Reservations are only added, and a later position in the queue has no more
    victims, so a job with equal needs and as many nodes gets none either. A job that waits for the
    zone layout of its checkpoint, or may not preempt, is not comparable.
    """

    def __init__(self, availability: NodeAvailability) -> None:
        self._availability = availability
        self._cycle = availability.cycle
        self._least: dict[tuple[object, ...], int] = {}

    def is_unschedulable(self, job: JobState, requirements: tuple[object, ...]) -> bool:
        """Whether no nodes can be found: too few are available, or a comparable job found none."""
        if zone_layout_deadline(self._cycle, job) is not None:
            return False
        least = self._least.get(requirements[:-1])
        if least is not None and least <= job.spec.nodes:
            return True
        return self._availability.largest_gang(job) < job.spec.nodes

    def failed(self, job: JobState, requirements: tuple[object, ...]) -> None:
        """Record that no nodes were found for the job."""
        cycle = self._cycle
        partial = (
            job.key in cycle.delayed_preemptions or zone_layout_deadline(cycle, job) is not None
        )
        if not partial and not in_refusal_cooldown(cycle, job):
            least = self._least.get(requirements[:-1], job.spec.nodes)
            self._least[requirements[:-1]] = min(least, job.spec.nodes)

    def clear(self) -> None:
        """Clear the cache after an allocation."""
        self._least.clear()


def _is_never(job: JobState) -> bool:
    """Whether no state of the cluster would let the job run, when it was last checked."""
    pending = job.status.pending
    return pending is not None and pending.verdict == "Never"


def _shape(job: JobState) -> tuple[object, ...]:
    """The fields that decide whether a job can ever run."""
    return job.spec.nodes, *node_requirements(job), job.spec.cross_zone


def _start_ready_jobs(cycle: CycleState, availability: NodeAvailability) -> None:
    """Start each job whose nodes are all empty, and for which the cross-zone token is free."""
    waiting = [job for job in cycle.active_jobs().values() if job.status.phase in WAITING]
    for key in [job.key for job in sorted(waiting, key=lambda job: queue_position(cycle, job))]:
        job = cycle.jobs[key]
        cycle.current_job = key
        assignment = job.status.assignment
        assert assignment is not None, f"{key}: reserved without nodes"
        occupied = [name for name in assignment.names if name in availability.occupied_by]
        leaving = availability.token_holders(job)[1] if len(assignment.zones) > 1 else []
        if not occupied and not leaving:
            transitions.start(cycle, key)
            availability.occupied_by |= dict.fromkeys(assignment.names, key)
            continue
        pending, previous = (
            pending_reasons.draining(availability, job, occupied, leaving),
            job.status.pending,
        )
        phase = Phase.DRAINING if occupied else Phase.RESERVED
        same = previous is not None and previous.replace(time=None) == pending
        if not same or phase is not job.status.phase:
            cycle.update(key, phase=phase, pending=pending.replace(time=cycle.now))
    cycle.current_job = ""


def _pause(cycle: CycleState, job: JobState) -> Pending | None:
    until = job.status.history.not_before
    if until is None or until <= cycle.now:
        return None
    cycle.wake(until)
    return pending_reasons.in_backoff(job, until)


def _behind(cycle: CycleState, job: JobState, ahead: JobState) -> Pending:
    if ahead.key in cycle.delayed_preemptions:
        cycle.delayed_preemptions.add(job.key)
    behind = cycle.behind_pending.get(ahead.key)
    if behind is None:
        behind = cycle.behind_pending[ahead.key] = pending_reasons.behind_job(ahead)
    return behind


__all__ = ["UnschedulableNeeds", "schedule", "schedule_and_start"]

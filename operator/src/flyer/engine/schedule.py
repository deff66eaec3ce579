"""Giving out nodes: by priority, then in the order in which jobs were submitted.

For each waiting job in turn: can it ever run; does it fit on nodes that are nobody's; could it with
nodes of cheaper jobs; if not, which nodes does it wait for. Jobs behind a blocked one go ahead only
on nodes that it does not wait for, or if they are certain to be back in time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import blockers, queue, transitions
from flyer.engine.allocation import allocate, was_refused
from flyer.engine.claims import claim_for
from flyer.engine.draft import WAITING
from flyer.engine.market import Market
from flyer.engine.pendings import Pendings
from flyer.engine.queue import Walk, needs_of
from flyer.engine.quotagate import QuotaGate
from flyer.engine.search import Reasons, Search

if TYPE_CHECKING:
    from flyer.api import FlyerJobSpec, Pending
    from flyer.engine.claims import Claim
    from flyer.engine.draft import Draft
    from flyer.engine.queue import ClassKey, Contender
    from flyer.engine.state import JobState

# Blocked jobs that hold a claim on nodes. Beyond it jobs wait without one: the order of the queue
# brings them among the first in time.
_CLAIMS_MAX = 16
# So many jobs at the head of the queue are looked at one by one. Behind them the rest of a class is
# left out as soon as nothing is to be had for it, and its reasons are written in turn.
_HEAD_JOBS = 32
# Of one user's jobs that could run and get no nodes: those behind wait until these have started.
# Of those that may not run now, or ever, as many are looked at on top.
_USER_JOBS_MAX = 256
_EXPLAINED_PER_SECOND = 20
_EXPLAINED_MAX = 256


def schedule(draft: Draft) -> list[Claim]:
    """Give nodes to every waiting job that may have them now; the claims of those that wait."""
    return _planned(draft).claims


def schedule_and_launch(draft: Draft) -> None:
    """Give nodes out, and start each job whose nodes are all empty."""
    _launch(draft, _planned(draft).market)


def _planned(draft: Draft) -> _Plan:
    plan = _Plan(draft)
    plan.run()
    draft.about = ""
    return plan


class _Plan:
    """One pass over the queue."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.market = Market(draft)
        self._gate = QuotaGate(self.market)
        self._queue = queue.updated(draft)
        self._walk = Walk(self._queue, self._leaving())
        self.claims: list[Claim] = []
        self._blocked: dict[tuple[object, ...], JobState] = {}  # the least that was not to be had
        # Whom the rest of a class waits behind, at each level.
        self._ahead: dict[tuple[ClassKey, int], JobState] = {}
        self._search = Search(self.market)
        self._reasons = Reasons(self.market)
        self._verdicts: dict[tuple[object, ...], Pending | None] = {}
        self._pendings = Pendings(self.market)
        self._waiting = 0  # looked at, and not placed
        # Jobs that could run and got no nodes, by user; and those behind too many of their user.
        self._looks: Counter[str] = Counter()
        self._barred_looks: Counter[str] = Counter()
        self._behind_own: set[str] = set()
        self._placed: list[Contender] = []
        self._skipping = False

    def _leaving(self) -> list[Contender]:
        """Preempted jobs that have still to leave their nodes: they keep their place."""
        return [
            (self._draft.place(job), job.key)
            for job in self._draft.active_jobs().values()
            if job.status.suspension is not None
            and job.status.suspension.reason == "Preempted"
            and not job.suspend
        ]

    def run(self) -> None:
        draft = self._draft
        told = set()
        for (place, key), class_key in self._walk:
            job = draft.jobs[key]
            draft.about = key
            if job.status.phase is Phase.SUSPENDING:
                self.claims += self._claim(job)
                continue
            if key not in told:  # else it is an `auto` job at its next level
                if self._looks[job.user] >= _USER_JOBS_MAX:
                    self._behind_own.add(key)
                    self._skipping = True
                    continue
                if _is_never(job) and self._barred_looks[job.user] >= _USER_JOBS_MAX:
                    self._skipping = True  # it is judged again in its turn among the reasons
                    continue
                self._looks[job.user] += 1
                told.add(key)
                self._gate.enter(job, -place[0])
            ends = self._look_at(job, class_key)
            if ends and class_key is not None and self._waiting >= _HEAD_JOBS:
                self._walk.skip()
                self._skipping = True
        self._explain(told)
        self._pendings.close()

    def _look_at(self, job: JobState, class_key: ClassKey | None) -> bool:
        """Place the job, or tell why not; whether the same holds for the rest of its class."""
        barred = self._barred(job)
        if barred is not None:
            if self._barred_looks[job.user] < _USER_JOBS_MAX:
                self._barred_looks[job.user] += 1
                self._looks[job.user] -= 1  # nobody waits for it
            self._tell(job, barred)
            return True
        if self._gate.lower(job):  # `auto`: no room at this level, perhaps at the next
            if class_key is None:
                self._walk.put((self._draft.place(job), job.key))
            else:  # whoever wants the same finds no more room
                self._walk.lower(self._draft.level(job))
            return False
        out = self._gate.refusal(job)
        if out is not None:
            self._tell(job, out)
            return True
        needs = self._needs(job)
        ahead = self._blocked.get(needs)
        if ahead is not None and ahead.spec.nodes <= job.spec.nodes:
            if class_key is not None:
                self._ahead.setdefault((class_key, self._draft.level(job)), ahead)
            self._gate.fill(job)
            self._tell(job, _behind(self._draft, job, ahead))
            return not self._gate.charges(job)
        if not self._search.is_hopeless(job, needs) and allocate(
            self.market, job, self.claims, self._gate
        ):
            self._blocked.clear()
            self._search.clear()
            self._reasons.clear()
            self._pendings.placed()
            self._placed.append((self._draft.place(job), job.key))
            self._looks[job.user] -= 1
            self._gate.fill(job)
            return False
        return self._left_over(job, needs, class_key)

    def _left_over(
        self, job: JobState, needs: tuple[object, ...], class_key: ClassKey | None
    ) -> bool:
        """No nodes were found; whether none are found for the rest of its class, and no claims."""
        self._search.failed(job, needs)
        own: list[Claim] = []
        if not was_refused(self._draft, job):  # nobody waits for a job that may not have its pods
            self._blocked[needs] = job
            own = self._claim(job)
            self.claims += own
        self._gate.fill(job)  # from now on its share is taken, for itself too
        eta = own[0].needed_at if own and math.isfinite(own[0].needed_at) else None
        self._tell(job, self._reasons.of(job, self.claims, own, eta))
        if needs[-1]:  # the others remember other nodes: they are no followers of this one
            ends = not own and self._search.is_hopeless(job, needs)
        else:
            ends = True
            if class_key is not None:
                self._ahead.setdefault((class_key, self._draft.level(job)), job)
        return ends and not self._gate.charges(job)

    def _barred(self, job: JobState) -> Pending | None:
        """Why the job cannot be placed whatever others have: not yet, or never."""
        paused = _pause(self._draft, job)
        if paused is not None:
            return paused
        shape = _shape(job.spec)
        if shape not in self._verdicts:
            self._verdicts[shape] = blockers.never(self.market, job)
        return self._verdicts[shape] or self._gate.never(job)

    def _needs(self, job: JobState) -> tuple[object, ...]:
        """Of two jobs with equal needs, the one with more nodes is blocked if the other one is."""
        history = job.status.history
        alone = (
            job.key if history.previous or history.avoid else ""
        )  # it remembers nodes of its own
        admitted = None  # without limits any
        if self._gate.limited:
            admitted = tuple(
                nodes[0].node_class
                for nodes in self.market.classes(job)
                if self._gate.admits(job, nodes[0].node_class)
            )
        return needs_of(self._draft, job), admitted, alone

    def _claim(self, job: JobState) -> list[Claim]:
        if len(self.claims) >= _CLAIMS_MAX:
            return []
        if job.status.phase is Phase.SUSPENDING:  # counted in its limits where its nodes are
            claim = claim_for(self.market, job, self.claims)
        else:
            claim = claim_for(
                self.market, job, self.claims, lambda found: self._gate.admits(job, found)
            )
        return [] if claim is None else [claim]

    def _tell(self, job: JobState, pending: Pending) -> None:
        self._waiting += 1
        position = self._waiting
        if self._skipping:
            position = self._position((self._draft.place(job), job.key))
        self._pendings.set(job, pending, position, self.claims)

    def _position(self, contender: Contender) -> int:
        """Its place among those without nodes, from 1."""
        ahead = bisect_left(self._queue.order, contender) - bisect_left(self._placed, contender)
        return ahead + 1

    def _explain(self, told: set[str]) -> None:
        """Write why some wait who were left out: those that are new, and the others in turn."""
        draft, entries = self._draft, self._queue.entries
        new = sorted(self._queue.unexplained, key=lambda key: entries[key].contender)
        asked = [draft.subject] if draft.subject in entries else []
        for key in dict.fromkeys([*asked, *new, *self._in_turn()]):
            if key not in told:
                draft.about = key
                job, entry = draft.jobs[key], entries[key]
                self._gate.enter(job)
                while self._gate.lower(job):
                    pass
                why = self._why(job, entry.class_key)
                self._pendings.set(job, why, self._position(entry.contender), self.claims)

    def _in_turn(self) -> list[str]:
        """The next ones of the queue, so many for each second."""
        queue, now = self._queue, self._draft.now
        count = _EXPLAINED_MAX
        if queue.explained_at is not None:
            count = min(count, int((now - queue.explained_at) * _EXPLAINED_PER_SECOND))
        if count == 0:
            return []
        to = queue.explained_to
        start = 0 if to is None else bisect_right(queue.order, to)
        taken = queue.order[start : start + count]
        to = taken[-1] if start + count < len(queue.order) else None
        self._draft.queue = replace(queue, explained_to=to, explained_at=now)
        return [key for _, key in taken]

    def _why(self, job: JobState, class_key: ClassKey | None) -> Pending:
        barred = self._barred(job)
        if barred is not None:
            return barred
        if job.key in self._behind_own:
            return blockers.behind_own(job, _USER_JOBS_MAX)
        out = self._gate.refusal(job)
        if out is not None:
            return out
        level = self._draft.level(job)
        if class_key is not None and (class_key, level) in self._ahead:
            return _behind(self._draft, job, self._ahead[class_key, level])
        return self._reasons.of(job, self.claims, (), None)


def _is_never(job: JobState) -> bool:
    """Whether no state of the cluster would let the job run, when it was last judged."""
    pending = job.status.pending
    return pending is not None and pending.verdict == "Never"


def _shape(spec: FlyerJobSpec) -> tuple[object, ...]:
    """All that decides whether a job can ever run."""
    return spec.nodes, spec.node_class, spec.zone, spec.ranks_per_node, spec.cross_zone


def _launch(draft: Draft, market: Market) -> None:
    """Start whoever has all nodes empty, and the token if it crosses zones."""
    waiting = [job for job in draft.active_jobs().values() if job.status.phase in WAITING]
    for key in [job.key for job in sorted(waiting, key=draft.place)]:
        job = draft.jobs[key]
        draft.about = key
        assignment = job.status.assignment
        assert assignment is not None, f"{key}: reserved without nodes"
        occupied = [name for name in assignment.names if name in market.occupied_by]
        leaving = market.token_holders(job)[1] if len(assignment.zones) > 1 else []
        if not occupied and not leaving:
            transitions.start(draft, key)
            market.occupied_by |= dict.fromkeys(assignment.names, key)
            continue
        pending, known = blockers.draining(market, job, occupied, leaving), job.status.pending
        phase = Phase.DRAINING if occupied else Phase.RESERVED
        same = known is not None and known.replace(time=None) == pending
        if not same or phase is not job.status.phase:
            draft.update(key, phase=phase, pending=pending.replace(time=draft.now))
    draft.about = ""


def _pause(draft: Draft, job: JobState) -> Pending | None:
    until = job.status.history.not_before
    if until is None or until <= draft.now:
        return None
    draft.wake(until)
    return blockers.pausing(job, until)


def _behind(draft: Draft, job: JobState, ahead: JobState) -> Pending:
    if ahead.key in draft.delayed:
        draft.delayed.add(job.key)
    known = draft.behind.get(ahead.key)
    if known is None:
        known = draft.behind[ahead.key] = blockers.behind(ahead)
    return known


__all__ = ["schedule", "schedule_and_launch"]

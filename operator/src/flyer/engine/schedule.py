"""Giving out nodes: by priority, then in the order in which chains were submitted.

For each waiting job in turn: can it ever run; does it fit on nodes that are nobody's; could it with
nodes of cheaper jobs; if not, which nodes does it wait for. Jobs behind a blocked one go ahead only
on nodes that it does not wait for, or if they are certain to be back in time.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.api.waiting import PODS_REFUSED
from flyer.engine import blockers, placement, transitions
from flyer.engine.claims import claim_for, claimed, is_ahead_of_turn
from flyer.engine.draft import ACTIVE, WAITING
from flyer.engine.market import Market, by_zone, options, struggles, waits_for_split
from flyer.engine.pendings import Pendings
from flyer.engine.preemption import preempt, preemption_plan
from flyer.engine.quotagate import QuotaGate
from flyer.engine.state import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import FlyerJobSpec, Pending
    from flyer.engine.claims import Claim
    from flyer.engine.draft import Draft
    from flyer.engine.nodes import Node
    from flyer.engine.placement import Option
    from flyer.engine.state import JobState

# Blocked jobs that hold a claim on nodes. Beyond it jobs wait without one: the order of the queue
# brings them among the first in time.
_CLAIMS_MAX = 16

_Contender = tuple[tuple[int, float, float, str], str]


def schedule(draft: Draft) -> list[Claim]:
    """Give nodes to every waiting job that may have them now; the claims of those that wait."""
    market = Market(draft)
    gate = QuotaGate(market)
    claims: list[Claim] = []
    blocked: dict[tuple[object, ...], JobState] = {}  # the least that was not to be had
    search = _Search(draft)
    reasons = _Reasons(market)
    verdicts: dict[tuple[object, ...], Pending | None] = {}
    contenders = _contenders(draft, gate)
    lowered: list[_Contender] = []  # those that go on at a lower level
    pendings = Pendings(market)
    while contenders or lowered:
        first = lowered and (not contenders or lowered[0] < contenders[-1])
        _, key = heapq.heappop(lowered) if first else contenders.pop()
        job = draft.jobs[key]
        draft.about = key
        if job.status.phase is Phase.SUSPENDING:
            claims += _claim(market, job, claims)
            continue
        paused = _pause(draft, job)
        if paused is not None:
            pendings.set(job, paused)
            continue
        shape = _shape(job.spec)
        if shape not in verdicts:
            verdicts[shape] = blockers.never(draft, job)
        never = verdicts[shape] or gate.never(job)
        if never is not None:
            pendings.set(job, never)
            continue
        if gate.lower(job):  # `auto`: no room at this level, perhaps at the next
            heapq.heappush(lowered, (draft.place(job), key))
            continue
        out = gate.refusal(job)
        if out is not None:
            pendings.set(job, out, claims)
            continue
        needs = _needs(market, job, gate)
        ahead = blocked.get(needs)
        if ahead is not None and ahead.spec.nodes <= job.spec.nodes:
            gate.fill(job)
            pendings.set(job, _behind(draft, job, ahead), claims)
            continue
        if not search.is_hopeless(job, needs) and _place(market, job, claims, gate):
            blocked.clear()
            search.clear()
            reasons.clear()
            pendings.placed()
            gate.fill(job)
            continue
        search.failed(job, needs)
        gate.fill(job)
        own: list[Claim] = []
        if not _was_refused(draft, job):  # nobody waits for a job that may not have its pods
            blocked[needs] = job
            own = _claim(market, job, claims)
            claims += own
        eta = own[0].needed_at if own and math.isfinite(own[0].needed_at) else None
        pendings.set(job, reasons.of(job, needs, claims, own, eta), claims)
    draft.about = ""
    pendings.close()
    return claims


def _waiting(draft: Draft) -> list[JobState]:
    return [
        job for job in draft.jobs.values() if job.status.phase is Phase.QUEUED and not job.removed
    ]


def _contenders(draft: Draft, gate: QuotaGate) -> list[_Contender]:
    """The waiting jobs, and those preempted ones that are still leaving: they keep their place.

    By place in the queue, the first one last: an `auto` job begins at its highest level.
    """
    leaving = [
        job
        for job in draft.active_jobs().values()
        if job.status.suspension is not None
        and job.status.suspension.reason == "Preempted"
        and not job.suspend
    ]
    waiting = _waiting(draft)
    for job in waiting:
        gate.enter(job)
    found = [(_standing(draft, job).place, job.key) for job in waiting]
    found += [(draft.place(job), job.key) for job in leaving]
    return sorted(found, reverse=True)


def _shape(spec: FlyerJobSpec) -> tuple[object, ...]:
    """All that decides whether a job can ever run."""
    return spec.nodes, spec.group, spec.ranks_per_node, spec.cross_zone


def _needs(market: Market, job: JobState, gate: QuotaGate) -> tuple[object, ...]:
    """Of two jobs with equal needs, the one with more nodes is blocked if the other one is."""
    chain = job.status.chain
    alone = job.key if chain.previous or chain.avoid else ""  # it remembers nodes of its own
    admitted = None  # without limits any
    if gate.limited:
        admitted = tuple(
            nodes[0].node_class
            for nodes in market.classes(job)
            if gate.admits(job, nodes[0].node_class)
        )
    return _standing(market.draft, job).needs, admitted, alone


def _standing(draft: Draft, job: JobState) -> Standing:
    """Place and needs, kept with the job until it changes: most of a long queue does not."""
    limits, level, known = draft.zones.limits, draft.level(job), job.standing
    if known is not None and known.limits is limits and known.level == level:
        return known
    spec = job.spec
    needs = (
        level, spec.node_class, spec.zone, spec.ranks_per_node, spec.cross_zone,
        spec.max_runtime, draft.terms(job), struggles(draft, job),
    )  # fmt: skip
    found = Standing(limits, level, draft.place(job), needs)
    if job.status.chain.submitted_at is not None:  # else its place moves with the time
        object.__setattr__(job, "standing", found)
    return found


class _Search:
    """Needs for which no nodes were found since nodes were last given out.

    What a job remembers of its nodes (the last part of its needs) decides which nodes it gets, but
    not whether it gets any: with fewer or other wishes than another one, it finds no more nodes.
    Claims are only added, and a later place in the queue has no more victims. Not comparable is a
    job that waits for the split of its checkpoint, or may not preempt.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._least: dict[tuple[object, ...], int] = {}

    def is_hopeless(self, job: JobState, needs: tuple[object, ...]) -> bool:
        least = self._least.get(needs[:-1])
        if least is None or least > job.spec.nodes:
            return False
        return waits_for_split(self._draft, job) is None

    def failed(self, job: JobState, needs: tuple[object, ...]) -> None:
        draft = self._draft
        partial = job.key in draft.delayed or waits_for_split(draft, job) is not None
        if not partial and not _was_refused(draft, job):
            least = self._least.get(needs[:-1], job.spec.nodes)
            self._least[needs[:-1]] = min(least, job.spec.nodes)

    def clear(self) -> None:
        self._least.clear()


class _Reasons:
    """Why jobs were not placed: in the same words for those that want the same.

    Nodes that a job remembers are not in these words, unless it waits for the split of its
    checkpoint. Not comparable is a job that still occupies nodes, or waits for some of its own.
    """

    def __init__(self, market: Market) -> None:
        self._market = market
        self._known: dict[tuple[object, ...], Pending] = {}

    def of(
        self,
        job: JobState,
        needs: tuple[object, ...],
        claims: Sequence[Claim],
        own: Sequence[Claim],
        eta: float | None,
    ) -> Pending:
        market = self._market
        if own or job.status.occupied or waits_for_split(market.draft, job) is not None:
            return blockers.pending(market, job, claims, eta)
        key = (*needs[:-1], job.spec.nodes, len(claims))
        if key not in self._known:
            self._known[key] = blockers.pending(market, job, claims, eta)
        return self._known[key]

    def clear(self) -> None:
        self._known.clear()


def _claim(market: Market, job: JobState, claims: Sequence[Claim]) -> list[Claim]:
    claim = claim_for(market, job, claims) if len(claims) < _CLAIMS_MAX else None
    return [] if claim is None else [claim]


def launch(draft: Draft) -> None:
    """Start whoever has all nodes empty, and the token if it crosses zones."""
    waiting = [job for job in draft.active_jobs().values() if job.status.phase in WAITING]
    if not waiting:
        return
    market = Market(draft)
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
    until = job.status.chain.not_before
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


def _place(market: Market, job: JobState, claims: Sequence[Claim], gate: QuotaGate) -> bool:
    """Reserve nodes for the job, if need be by preempting; False if it cannot have any now.

    Nodes that failed it, or others, are taken only if there is no way without them.
    """
    draft = market.draft
    classes = [nodes for nodes in market.classes(job) if gate.admits(job, nodes[0].node_class)]
    patience = waits_for_split(draft, job)
    if patience is not None:
        draft.wake(patience)
    avoid = market.memory(job).avoid
    trusted = [[node for node in nodes if node.name not in avoid] for nodes in classes]
    ways = [[nodes for nodes in trusted if nodes], classes] if avoid else [classes]
    for nodes in ways:
        if _place_on(market, job, nodes, claims, same_split=patience is not None):
            return True
        if job.key in draft.delayed:
            return False
    return False


def _place_on(
    market: Market,
    job: JobState,
    classes: Sequence[Sequence[Node]],
    claims: Sequence[Claim],
    *,
    same_split: bool,
) -> bool:
    draft = market.draft
    ways = [
        (nodes, kind)
        for nodes in classes
        for kind in options(draft, job, {node.zone for node in nodes}, same_split=same_split)
    ]
    for nodes, kind in ways:
        found = _fit_free(market, job, nodes, kind, claims)
        if found is not None:
            early = is_ahead_of_turn(market, job, found, claims)
            transitions.reserve(draft, job.key, found, backfill=early)
            market.reserved(job.key)
            return True
    if _was_refused(draft, job):
        return False
    if same_split and _fits_otherwise(market, job, classes, claims):
        return False  # it will have free nodes at the latest when it stops waiting for the split
    for nodes, kind in ways:
        plan = preemption_plan(market, job, nodes, kind, claims)
        if plan is not None:
            if _too_early(draft, job, plan[1]):
                draft.delayed.add(job.key)
                return False
            early = is_ahead_of_turn(market, job, plan[0], claims)
            preempt(market, job, *plan, backfill=early)
            market.refresh()
            return True
    return False


def _was_refused(draft: Draft, job: JobState) -> bool:
    """Whether its pods could not be made a while ago: nobody is to lose work for it now."""
    left = job.status.eviction
    if left is None or left.reason != PODS_REFUSED:
        return False
    chain, policy = job.status.chain, draft.policy
    pause_seconds = min(
        policy.refused_seconds * 2.0 ** min(max(chain.refusals - 1, 0), 30),
        policy.refused_seconds_max,
    )
    until = (left.time if chain.not_before is None else chain.not_before) + pause_seconds
    draft.wake(until)
    return until > draft.now


def _fits_otherwise(
    market: Market, job: JobState, classes: Sequence[Sequence[Node]], claims: Sequence[Claim]
) -> bool:
    """Whether free nodes would do with another split over zones than the checkpoint's."""
    return any(
        _fit_free(market, job, nodes, kind, claims) is not None
        for nodes in classes
        for kind in options(market.draft, job, {node.zone for node in nodes}, same_split=False)
    )


def _too_early(draft: Draft, job: JobState, victims: Sequence[str]) -> bool:
    """Whether running jobs would be interrupted for a job that has only just begun to wait."""
    if not any(draft.jobs[key].status.phase in ACTIVE for key in victims):
        return False
    queued_at = job.status.chain.queued_at
    since = queued_at if queued_at is not None else draft.now
    return not draft.passed(since + draft.policy.preemption_delay_seconds)


def _fit_free(
    market: Market,
    job: JobState,
    nodes: Sequence[Node],
    kind: Sequence[Option],
    claims: Sequence[Claim],
) -> tuple[Node, ...] | None:
    """Nodes that are nobody's: empty or its own ones if they do, else also those being left."""
    keeping, leaving = market.token_holders(job)
    unclaimed = market.open_of(nodes)
    if claims:
        unclaimed = [node for node in unclaimed if not claimed(market, job, node, claims)]
    empty = [node for node in unclaimed if market.occupied_by.get(node.name) in (None, job.key)]
    for candidates, token_free in ((empty, not leaving), (unclaimed, True)):
        usable = [one for one in kind if not one.crosses or (token_free and not keeping)]
        found = placement.best(usable, by_zone(candidates), market.memory(job))
        if found is not None:
            return found[1]
    return None


__all__ = ["launch", "schedule"]

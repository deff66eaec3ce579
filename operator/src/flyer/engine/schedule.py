"""Giving out nodes: by priority, then in the order in which chains were submitted.

For each waiting job in turn: can it ever run; does it fit on nodes that are nobody's; could it with
nodes of cheaper jobs; if not, which nodes does it wait for. Jobs behind a blocked one go ahead only
on nodes that it does not wait for, or if they are certain to be back in time.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from flyer.api import Phase, quantize
from flyer.api.waiting import PODS_REFUSED
from flyer.engine import blockers, placement, transitions
from flyer.engine.draft import WAITING
from flyer.engine.market import (
    Claim,
    Market,
    by_zone,
    memory_of,
    options,
    waits_for_split,
)
from flyer.engine.quotagate import QuotaGate
from flyer.engine.victims import Candidate, cheapest_cover, cheapest_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import FlyerJobSpec, Pending
    from flyer.engine.draft import Draft
    from flyer.engine.nodes import Node
    from flyer.engine.placement import Option
    from flyer.engine.state import JobState

# Blocked jobs that hold a claim on nodes. Beyond it jobs wait without one: the order of the queue
# brings them among the first in time.
_CLAIMS_MAX = 16


def schedule(draft: Draft) -> None:
    """Give nodes to every waiting job that may have them now."""
    market = Market(draft)
    gate = QuotaGate(market)
    claims: list[Claim] = []
    blocked: dict[tuple[object, ...], JobState] = {}  # the least that was not to be had
    verdicts: dict[tuple[object, ...], Pending | None] = {}
    contenders = _contenders(draft, gate)
    while contenders:
        _, key = heapq.heappop(contenders)
        job = draft.jobs[key]
        draft.about = key
        if job.status.phase is Phase.SUSPENDING:
            claims += _claim(market, job, claims)
            continue
        if _pause(draft, job):
            continue
        shape = _shape(job.spec)
        if shape not in verdicts:
            verdicts[shape] = blockers.never(draft, job)
        never = verdicts[shape] or gate.never(job)
        if never is not None:
            _set_pending(draft, job, never)
            continue
        if gate.lower(job):  # `auto`: no room at this level, perhaps at the next
            heapq.heappush(contenders, (queue_order(draft, job), key))
            continue
        out = gate.refusal(job)
        if out is not None:
            _set_pending(draft, job, out)
            continue
        ahead = blocked.get(_needs(draft, job))
        if ahead is not None and ahead.spec.nodes <= job.spec.nodes:
            gate.fill(job)
            _set_pending(draft, job, blockers.behind(ahead))
            continue
        if _place(market, job, claims, gate):
            blocked.clear()
            gate.fill(job)
            continue
        gate.fill(job)
        blocked[_needs(draft, job)] = job
        own = _claim(market, job, claims)
        claims += own
        eta = own[0].needed_at if own and math.isfinite(own[0].needed_at) else None
        _set_pending(draft, job, blockers.pending(market, job, claims, eta))
    draft.about = ""


def queue(draft: Draft) -> list[str]:
    """The waiting jobs, the next first."""
    waiting = [
        job for job in draft.jobs.values() if job.status.phase is Phase.QUEUED and not job.removed
    ]
    return [job.key for job in sorted(waiting, key=lambda job: queue_order(draft, job))]


def _contenders(draft: Draft, gate: QuotaGate) -> list[tuple[tuple[int, float, str], str]]:
    """The waiting jobs, and those preempted ones that are still leaving: they keep their place.

    A heap by place in the queue: an `auto` job begins at its highest level.
    """
    leaving = [
        job
        for job in draft.jobs.values()
        if job.status.suspension is not None
        and job.status.suspension.reason == "Preempted"
        and not job.suspend
    ]
    waiting = [draft.jobs[key] for key in queue(draft)]
    for job in waiting:
        gate.enter(job)
    heap = [(queue_order(draft, job), job.key) for job in waiting + leaving]
    heapq.heapify(heap)
    return heap


def _shape(spec: FlyerJobSpec) -> tuple[object, ...]:
    """All that decides whether a job can ever run."""
    return spec.nodes, spec.group, spec.ranks_per_node, spec.cross_zone


def _needs(draft: Draft, job: JobState) -> tuple[object, ...]:
    """Of two jobs with equal needs, the one with more nodes is blocked if the other one is."""
    spec, chain = job.spec, job.status.chain
    alone = job.key if chain.previous or chain.avoid else ""  # it remembers nodes of its own
    return (
        draft.level(job), spec.node_class, spec.zone, spec.ranks_per_node, spec.cross_zone,
        spec.max_runtime, spec.preemption.max_grace, alone,
    )  # fmt: skip


def _claim(market: Market, job: JobState, claims: Sequence[Claim]) -> list[Claim]:
    claim = claim_for(market, job, claims) if len(claims) < _CLAIMS_MAX else None
    return [] if claim is None else [claim]


def queue_order(draft: Draft, job: JobState) -> tuple[int, float, str]:
    """Priority, then the chain's own submit time: a resumed job has not lost its place."""
    submitted_at = job.status.chain.submitted_at
    return (-draft.level(job), submitted_at if submitted_at is not None else draft.now, job.key)


def launch(draft: Draft) -> None:
    """Start whoever has all nodes empty, and the token if it crosses zones."""
    waiting = [job for job in draft.jobs.values() if job.status.phase in WAITING]
    if not waiting:
        return
    market = Market(draft)
    for key in [job.key for job in sorted(waiting, key=lambda job: queue_order(draft, job))]:
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
        draft.update(
            key,
            phase=Phase.DRAINING if occupied else Phase.RESERVED,
            pending=blockers.draining(market, job, occupied, leaving),
        )
    draft.about = ""


def _pause(draft: Draft, job: JobState) -> bool:
    until = job.status.chain.not_before
    if until is None or until <= draft.now:
        return False
    draft.wake(until)
    _set_pending(draft, job, blockers.pausing(job, until))
    return True


def _set_pending(draft: Draft, job: JobState, pending: Pending) -> None:
    if job.status.pending != pending:
        draft.update(job.key, pending=pending)


def _place(market: Market, job: JobState, claims: Sequence[Claim], gate: QuotaGate) -> bool:
    """Reserve nodes for the job, if need be by preempting; False if it cannot have any now."""
    draft = market.draft
    classes = [nodes for nodes in market.classes(job) if gate.admits(job, nodes[0].node_class)]
    patience = waits_for_split(draft, job)
    if patience is not None:
        draft.wake(patience)
    for nodes in classes:
        zones = {node.zone for node in nodes}
        kinds = options(draft, job, zones, same_split=patience is not None)
        for kind in kinds:
            found = _fit_free(market, job, nodes, kind, claims)
            if found is not None:
                transitions.reserve(draft, job.key, found)
                market.reserved(job.key)
                return True
    if _was_refused(draft, job):
        return False
    for nodes in classes:
        zones = {node.zone for node in nodes}
        for kind in options(draft, job, zones, same_split=patience is not None):
            plan = preemption_plan(market, job, nodes, kind, claims)
            if plan is not None:
                _preempt(draft, job, *plan)
                market.refresh()
                return True
    return False


def _was_refused(draft: Draft, job: JobState) -> bool:
    """Whether its pods could not be made a while ago: nobody is to lose work for it now."""
    left = job.status.eviction
    if left is None or left.reason != PODS_REFUSED:
        return False
    not_before = job.status.chain.not_before
    until = (left.time if not_before is None else not_before) + draft.policy.refused_seconds
    draft.wake(until)
    return until > draft.now


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
        unclaimed = [node for node in unclaimed if not _claimed(market, job, node, claims)]
    empty = [node for node in unclaimed if market.occupied_by.get(node.name) in (None, job.key)]
    for candidates, token_free in ((empty, not leaving), (unclaimed, True)):
        usable = [one for one in kind if not one.crosses or (token_free and not keeping)]
        found = placement.best(usable, by_zone(candidates), memory_of(job))
        if found is not None:
            return found[1]
    return None


def _claimed(market: Market, job: JobState, node: Node, claims: Sequence[Claim]) -> bool:
    """Whether a job ahead waits for this node, and would wait longer for it."""
    draft = market.draft
    for claim in claims:
        if node.name not in claim.nodes:
            continue
        if job.spec.max_runtime is None or not market.is_empty(node):
            return True
        back_at = (
            draft.now
            + draft.policy.start_deadline_seconds
            + job.spec.max_runtime.seconds
            + job.spec.preemption.max_grace.seconds
        )
        if back_at > claim.needed_at:
            return True
    return False


def preemption_plan(
    market: Market,
    job: JobState,
    nodes: Sequence[Node],
    kind: Sequence[Option],
    claims: Sequence[Claim],
    *,
    anyone: bool = False,
) -> tuple[tuple[Node, ...], tuple[str, ...]] | None:
    """The nodes and the victims that lose least, over the options of one kind.

    `anyone`: also jobs that may not be preempted, for the question what a person could do.
    """
    draft = market.draft
    holders = set(market.token_holders(job)[0])
    free = [
        node for node in nodes if market.is_open(node) and not _claimed(market, job, node, claims)
    ]
    victims: dict[str, JobState] = {}
    for key in sorted(draft.jobs):
        other = draft.jobs[key]
        if other.key == job.key or other.status.phase is not Phase.RUNNING:
            continue
        if not anyone and market.may_preempt(job, other):
            draft.wake(market.immune_until(other))
        allowed = market.may_preempt(job, other) and market.immune_until(other) <= draft.now
        if anyone or allowed:
            victims[key] = other
    freed = {
        key: [
            node
            for node in nodes
            if market.reserved_by.get(node.name) == key
            and draft.nodes[node.name].eligible
            and not any(node.name in claim.nodes for claim in claims)
        ]
        for key in victims
    }
    plans: list[tuple[tuple[int, int, int, int], tuple[Node, ...], tuple[str, ...]]] = []
    for index, option in enumerate(kind):
        needed_holders = holders if option.crosses else set()
        if not needed_holders <= victims.keys():
            continue
        chosen = _victims_for(market, job, option, free, freed, needed_holders)
        if chosen is None:
            continue
        pool = free + [node for key in chosen for node in freed[key]]
        laid = placement.choose(option, by_zone(pool), memory_of(job))
        if laid is None:
            continue
        cost = sum(market.cost_node_ms(victims[key]) for key in chosen)
        left = len([node for node in pool if node.zone in option.zones]) - option.nodes
        plans.append(((cost, len(chosen), left, index), laid, chosen))
    if not plans:
        return None
    _, laid, chosen = min(plans, key=lambda plan: plan[0])
    return laid, chosen


def _victims_for(
    market: Market,
    job: JobState,
    option: Option,
    free: Sequence[Node],
    freed: dict[str, list[Node]],
    holders: set[str],
) -> tuple[str, ...] | None:
    draft = market.draft
    candidates = [
        Candidate(
            key,
            market.cost_node_ms(draft.jobs[key]),
            sum(node.zone in option.zones for node in nodes),
        )
        for key, nodes in freed.items()
    ]
    # Equal cost: the lower priority, then the one that began last.
    candidates.sort(
        key=lambda one: (
            one.cost_node_ms,
            draft.level(draft.jobs[one.job]),
            -market.immune_until(draft.jobs[one.job]),
            one.job,
        )
    )
    if not option.crosses:
        here = sum(node.zone in option.zones for node in free)
        cover = cheapest_cover(candidates, option.nodes - here)
        return None if cover is None else tuple(sorted(one.job for one in cover))
    memory = memory_of(job)

    def enough(chosen: Sequence[Candidate]) -> bool:
        if not holders <= {one.job for one in chosen}:
            return False
        pool = list(free) + [node for one in chosen for node in freed[one.job]]
        return placement.choose(option, by_zone(pool), memory) is not None

    found = cheapest_set([one for one in candidates if one.gain or one.job in holders], enough)
    return None if found is None else tuple(sorted(one.job for one in found))


def _preempt(
    draft: Draft, job: JobState, nodes: tuple[Node, ...], victims: tuple[str, ...]
) -> None:
    for key in victims:
        transitions.begin_suspension(
            draft, key, reason="Preempted", by=job.key,
            message=f"preempted by {job.key} of {job.user} (priority {job.spec.priority})",
        )  # fmt: skip
    transitions.reserve(draft, job.key, nodes)


def claim_for(market: Market, job: JobState, claims: Sequence[Claim]) -> Claim | None:
    """The nodes that the blocked job will have first, and when; None if others wait for them."""
    taken = {name for claim in claims for name in claim.nodes}
    best: tuple[float, int, tuple[str, ...], frozenset[str]] | None = None
    count = job.spec.nodes
    for nodes in market.classes(job):
        zones = sorted({node.zone for node in nodes})
        pools: list[tuple[str, ...]] = [(zone,) for zone in zones]
        if market.draft.may_cross(job):
            pools += [one.zones for one in placement.cross_zone_options(count, zones)]
        for pool in pools:
            timed = sorted(
                (market.available_at(job, node), node.name)
                for node in nodes
                if node.zone in pool and node.name not in taken
                and market.draft.nodes[node.name].eligible
            )  # fmt: skip
            if len(timed) < count:
                continue
            needed_at = timed[count - 1][0]
            # If the time is known, leave what is free now to others as long as the rest will do.
            in_time = [one for one in timed if one[0] <= needed_at]
            chosen = in_time[-count:] if math.isfinite(needed_at) else timed[:count]
            free_now = sum(time <= market.draft.now for time, _ in timed)
            rank = (needed_at, -free_now, pool, frozenset(name for _, name in chosen))
            # One zone beats two unless two are sooner.
            if best is None or (rank[0], len(rank[2]), *rank[1:3]) < (
                best[0], len(best[2]), *best[1:3],
            ):  # fmt: skip
                best = rank
    if best is None:
        return None
    needed_at = best[0] if math.isinf(best[0]) else quantize(best[0])
    return Claim(job.key, best[3], needed_at)


__all__ = ["claim_for", "launch", "preemption_plan", "queue", "queue_order", "schedule"]

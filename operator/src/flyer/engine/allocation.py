"""Nodes for one job: free ones if they do, else those of others that give way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api.waiting import PODS_REFUSED
from flyer.engine import placement, transitions
from flyer.engine.asks import options, waits_for_zone_layout
from flyer.engine.claims import claimed, is_ahead_of_turn
from flyer.engine.draft import ACTIVE
from flyer.engine.placement import by_zone
from flyer.engine.preemption import preempt, preemption_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine.claims import Claim
    from flyer.engine.draft import Draft
    from flyer.engine.market import Market
    from flyer.engine.nodes import Node
    from flyer.engine.placement import Option
    from flyer.engine.quotagate import QuotaGate
    from flyer.engine.state import JobState


def allocate(market: Market, job: JobState, claims: Sequence[Claim], gate: QuotaGate) -> bool:
    """Reserve nodes for the job, if need be by preempting; False if it cannot have any now.

    Nodes that failed it, or others, are taken only if there is no way without them.
    """
    draft = market.draft
    classes = [nodes for nodes in market.classes(job) if gate.admits(job, nodes[0].node_class)]
    patience = waits_for_zone_layout(draft, job)
    if patience is not None:
        draft.wake(patience)
    avoid = market.memory(job).avoid
    trusted = [[node for node in nodes if node.name not in avoid] for nodes in classes]
    ways = [[nodes for nodes in trusted if nodes], classes] if avoid else [classes]
    for nodes in ways:
        if _place_on(market, job, nodes, claims, same_zone_layout=patience is not None):
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
    same_zone_layout: bool,
) -> bool:
    draft = market.draft
    ways = [
        (nodes, kind)
        for nodes in classes
        for kind in options(
            draft, job, {node.zone for node in nodes}, same_zone_layout=same_zone_layout
        )
    ]
    for nodes, kind in ways:
        found = _fit_free(market, job, nodes, kind, claims)
        if found is not None:
            early = is_ahead_of_turn(market, job, found, claims)
            transitions.reserve(draft, job.key, found, backfill=early)
            market.reserved(job.key)
            return True
    if was_refused(draft, job):
        return False
    if same_zone_layout and _fits_otherwise(market, job, classes, claims):
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


def was_refused(draft: Draft, job: JobState) -> bool:
    """Whether its pods could not be made a while ago: nobody is to lose work for it now."""
    left = job.status.eviction
    if left is None or left.reason != PODS_REFUSED:
        return False
    history, policy = job.status.history, draft.policy
    pause_seconds = min(
        policy.refused_seconds * 2.0 ** min(max(history.refusals - 1, 0), 30),
        policy.refused_seconds_max,
    )
    until = (left.time if history.not_before is None else history.not_before) + pause_seconds
    draft.wake(until)
    return until > draft.now


def _fits_otherwise(
    market: Market, job: JobState, classes: Sequence[Sequence[Node]], claims: Sequence[Claim]
) -> bool:
    """Whether free nodes would do with another split over zones than the checkpoint's."""
    return any(
        _fit_free(market, job, nodes, kind, claims) is not None
        for nodes in classes
        for kind in options(
            market.draft, job, {node.zone for node in nodes}, same_zone_layout=False
        )
    )


def _too_early(draft: Draft, job: JobState, victims: Sequence[str]) -> bool:
    """Whether running jobs would be interrupted for a job that has only just begun to wait."""
    if not any(draft.jobs[key].status.phase in ACTIVE for key in victims):
        return False
    queued_at = job.status.history.queued_at
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


__all__ = ["allocate", "was_refused"]

"""Nodes that blocked jobs wait for: backfill.

Others may use claimed nodes if they are back in time: because their `maxRuntime` ends before, or
because they can be preempted before. Every job behind the claimant can be: a lower priority by its
level, an equal one because it is marked as backfill. A claim whose time nobody knows (a job without
`maxRuntime` of a higher priority is in the way) therefore keeps no node empty, and a claim whose
time is known keeps nodes empty only during the last minutes, in which nobody could leave in time.
No job that is started on claimed nodes moves the time of the claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine import placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine.market import Market
    from flyer.engine.nodes import Node
    from flyer.engine.state import JobState


@dataclass(frozen=True, slots=True)
class Claim:
    """Nodes that a blocked job waits for."""

    job: str
    nodes: frozenset[str]
    needed_at: float  # infinite: nobody knows


def claimed(market: Market, job: JobState, node: Node, claims: Sequence[Claim]) -> bool:
    """Whether a job ahead waits for this node, and would wait longer for it."""
    if not any(node.name in claim.nodes for claim in claims):
        return False
    if not market.is_empty(node):
        return True
    soonest = min(_ends_at(market, job), _gives_way_at(market, job))
    return any(soonest > claim.needed_at for claim in claims if node.name in claim.nodes)


def is_ahead_of_turn(
    market: Market, job: JobState, nodes: Sequence[Node], claims: Sequence[Claim]
) -> bool:
    """Whether a job ahead waits for some of these nodes, and may have to ask for them."""
    ends_at = _ends_at(market, job)
    names = {node.name for node in nodes}
    return any(
        # Of a time that nobody knows, nobody can say that the job has ended by then.
        claim.nodes & names and (math.isinf(claim.needed_at) or ends_at > claim.needed_at)
        for claim in claims
    )


def _ends_at(market: Market, job: JobState) -> float:
    """When the job, started now, has ended by itself."""
    draft, runtime = market.draft, job.spec.max_runtime
    if runtime is None:
        return math.inf
    started_at = draft.now + draft.policy.start_deadline_seconds
    return started_at + runtime.seconds + draft.terms(job).max_grace


def _gives_way_at(market: Market, job: JobState) -> float:
    """When the job, started now, has left if a job ahead of it asks for its nodes."""
    draft, terms = market.draft, market.draft.terms(job)
    started_at = draft.now + draft.policy.start_deadline_seconds
    return started_at + terms.min_runtime + terms.max_grace


def claim_for(market: Market, job: JobState, claims: Sequence[Claim]) -> Claim | None:
    """The nodes that the blocked job will have first, and when; None if others wait for them."""
    taken = {name for claim in claims for name in claim.nodes}
    best: tuple[float, int, tuple[str, ...], frozenset[str]] | None = None
    count = job.spec.nodes
    known: dict[str, float] = {}
    for nodes in market.classes(job):
        zones = sorted({node.zone for node in nodes})
        pools: list[tuple[str, ...]] = [(zone,) for zone in zones]
        if market.draft.may_cross(job):
            pools += [one.zones for one in placement.cross_zone_options(count, zones)]
        times = sorted(
            (market.available_at(job, node, known), node.name, node.zone)
            for node in nodes
            if node.name not in taken and market.draft.nodes[node.name].eligible
        )
        for pool in pools:
            timed = [(at, name) for at, name, zone in times if zone in pool]
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


__all__ = ["Claim", "claim_for", "claimed", "is_ahead_of_turn"]

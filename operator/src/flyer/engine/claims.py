"""Nodes that blocked jobs wait for: backfill.

Other jobs may use claimed nodes if they release them in time: because their `activeDeadline` ends
earlier, or because they can be preempted earlier. Every job behind the claimant can be: a lower
priority by its level, an equal one because it is marked as backfill. A claim without a known time
(a job of a higher priority without `activeDeadline` is ahead) keeps no node empty, and
a claim with a known time keeps nodes empty only in the last minutes, when no job could leave in
time.
No job that is started on claimed nodes moves the time of the claim.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine import placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.engine.market import Market, Timed
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
    draft, runtime = market.draft, job.spec.active_deadline
    if runtime is None:
        return math.inf
    started_at = draft.now + draft.policy.start_deadline_seconds
    return started_at + runtime.seconds + draft.terms(job).max_checkpoint_grace_period


def _gives_way_at(market: Market, job: JobState) -> float:
    """When the job, started now, has left if a job ahead of it asks for its nodes."""
    draft, terms = market.draft, market.draft.terms(job)
    started_at = draft.now + draft.policy.start_deadline_seconds
    return started_at + terms.min_runtime + terms.max_checkpoint_grace_period


def claim_for(
    market: Market,
    job: JobState,
    claims: Sequence[Claim],
    admits: Callable[[str], bool] = lambda _: True,
) -> Claim | None:
    """The nodes that the blocked job will have first, and when; None if others wait for them.

    `admits` says of which classes of nodes the job may have some.
    """
    taken = {name for claim in claims for name in claim.nodes}
    best: tuple[float, int, tuple[str, ...], frozenset[str]] | None = None
    count = job.spec.nodes
    for nodes in market.classes(job):
        if not admits(nodes[0].node_class):
            continue
        zones = sorted({node.zone for node in nodes})
        pools: list[tuple[str, ...]] = [(zone,) for zone in zones]
        if market.draft.may_cross(job):
            pools += [
                cross_zone_option.zones
                for cross_zone_option in placement.cross_zone_options(count, zones)
            ]
        for pool in pools:
            found = _first(market.times(job, nodes, pool), taken, count, market.draft.now)
            if found is None:
                continue
            rank = (found[0], found[1], pool, found[2])
            # One zone beats two unless two are sooner.
            if best is None or (rank[0], len(rank[2]), *rank[1:3]) < (
                best[0], len(best[2]), *best[1:3],
            ):  # fmt: skip
                best = rank
    if best is None:
        return None
    needed_at = best[0] if math.isinf(best[0]) else quantize(best[0])
    return Claim(job.key, best[3], needed_at)


def _first(
    times: Sequence[Timed], taken: set[str], count: int, now: float
) -> tuple[float, int, frozenset[str]] | None:
    """So many nodes that are not taken: from when on, minus how many are free now, and which."""
    first = list(islice((time for time in times if time[1] not in taken), count))
    if len(first) < count:
        return None
    needed_at = first[-1][0]
    # If the time is known, leave what is free now to others as long as the rest will do.
    if math.isfinite(needed_at):
        in_time = reversed(times[: bisect_right(times, needed_at, key=_at)])
        first = list(islice((one for one in in_time if one[1] not in taken), count))
    free = times[: bisect_right(times, now, key=_at)]
    free_now = sum(one[1] not in taken for one in free)
    return needed_at, -free_now, frozenset(name for _, name in first)


def _at(timed: Timed) -> float:
    return timed[0]


__all__ = ["Claim", "claim_for", "claimed", "is_ahead_of_turn"]

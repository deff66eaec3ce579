"""Nodes that blocked jobs wait for: others may use them only if they are back in time."""

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


__all__ = ["Claim", "claim_for", "claimed"]

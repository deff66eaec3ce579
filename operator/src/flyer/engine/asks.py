"""What a waiting job asks for, besides the number of its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine import placement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine.draft import Draft
    from flyer.engine.placement import Memory, Option
    from flyer.engine.state import JobState


def wants_of(job: JobState) -> tuple[str | None, str | None, int]:
    """What decides which nodes would do."""
    return job.spec.node_class, job.spec.zone, job.spec.ranks_per_node


def struggles(draft: Draft, job: JobState) -> bool:
    """Whether the job's attempts fail one after the other: no equal gives way to it."""
    chain = job.status.chain
    failures = chain.fruitless_restarts + chain.unblamed_restarts
    return failures >= draft.policy.struggling_restarts or chain.refusals > 0


def memory_of(job: JobState) -> Memory:
    """What placement remembers of the job."""
    chain = job.status.chain
    return placement.Memory(
        tuple((node.name, node.zone) for node in chain.previous), frozenset(chain.avoid)
    )


def options(
    draft: Draft, job: JobState, zones: Iterable[str], *, same_split: bool
) -> list[list[Option]]:
    """The ways to lay the gang out, best kind first; only those like before if `same_split`."""
    known = set(zones)
    crossing = draft.may_cross(job)
    memory = memory_of(job)
    like_before: list[Option] = []
    if sum(memory.split) == job.spec.nodes:
        like_before = [
            one
            for one in placement.same_split_options(memory, known)
            if crossing or not one.crosses
        ]
    if same_split:
        return [like_before]
    single = placement.single_zone_options(job.spec.nodes, known)
    cross = placement.cross_zone_options(job.spec.nodes, known) if crossing else []
    return [kind for kind in (like_before, single, cross) if kind]


def waits_for_split(draft: Draft, job: JobState) -> float | None:
    """Until when the job takes only nodes with the split of its checkpoint."""
    chain = job.status.chain
    if job.status.checkpoint is None or sum(memory_of(job).split) != job.spec.nodes:
        return None
    since = chain.queued_at if chain.queued_at is not None else draft.now
    until = quantize(since + draft.policy.same_split_seconds)
    return until if until > draft.now else None


__all__ = ["memory_of", "options", "struggles", "waits_for_split", "wants_of"]

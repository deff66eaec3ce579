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
    history = job.status.history
    failures = history.restarts_without_progress + history.unblamed_restarts
    return failures >= draft.policy.struggling_restarts or history.refusals > 0


def memory_of(job: JobState) -> Memory:
    """What placement remembers of the job."""
    history = job.status.history
    return placement.Memory(
        tuple((node.name, node.zone) for node in history.previous), frozenset(history.avoid)
    )


def options(
    draft: Draft, job: JobState, zones: Iterable[str], *, same_zone_layout: bool
) -> list[list[Option]]:
    """Placement options, best kind first; only the previous one if `same_zone_layout`."""
    known = set(zones)
    crossing = draft.may_cross(job)
    memory = memory_of(job)
    like_before: list[Option] = []
    if sum(memory.split) == job.spec.nodes:
        like_before = [
            same_zone_layout_option
            for same_zone_layout_option in placement.same_zone_layout_options(memory, known)
            if crossing or not same_zone_layout_option.crosses
        ]
    if same_zone_layout:
        return [like_before]
    single = placement.single_zone_options(job.spec.nodes, known)
    cross = placement.cross_zone_options(job.spec.nodes, known) if crossing else []
    return [kind for kind in (like_before, single, cross) if kind]


def waits_for_zone_layout(draft: Draft, job: JobState) -> float | None:
    """Until when the job takes only nodes with the split of its checkpoint."""
    history = job.status.history
    if job.status.checkpoint is None or sum(memory_of(job).split) != job.spec.nodes:
        return None
    since = history.queued_at if history.queued_at is not None else draft.now
    until = quantize(since + draft.policy.same_zone_layout_seconds)
    return until if until > draft.now else None


__all__ = ["memory_of", "options", "struggles", "waits_for_zone_layout", "wants_of"]

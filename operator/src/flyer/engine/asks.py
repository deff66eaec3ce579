"""What a waiting job asks for, besides the number of its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine import placement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine.draft import CycleState
    from flyer.engine.placement import PlacementHistory, PlacementOption
    from flyer.engine.state import JobState


def node_requirements(job: JobState) -> tuple[str | None, str | None, int]:
    """What decides which nodes would do."""
    return job.spec.node_class, job.spec.zone, job.spec.ranks_per_node


def is_crash_looping(cycle: CycleState, job: JobState) -> bool:
    """Whether the job's attempts fail one after the other: no equal gives way to it."""
    history = job.status.history
    failures = history.restarts_without_progress + history.unblamed_restarts
    return failures >= cycle.settings.crash_loop_restarts or history.refusals > 0


def placement_history(job: JobState) -> PlacementHistory:
    """What placement remembers of the job."""
    history = job.status.history
    return placement.PlacementHistory(
        tuple((node.name, node.zone) for node in history.previous), frozenset(history.avoid)
    )


def placement_options(
    cycle: CycleState, job: JobState, zones: Iterable[str], *, same_zone_layout: bool
) -> list[list[PlacementOption]]:
    """Placement options, best kind first; only the previous one if `same_zone_layout`."""
    known = set(zones)
    crossing = cycle.may_cross(job)
    memory = placement_history(job)
    like_before: list[PlacementOption] = []
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


def zone_layout_deadline(cycle: CycleState, job: JobState) -> float | None:
    """Until when the job takes only nodes with the split of its checkpoint."""
    history = job.status.history
    if job.status.checkpoint is None or sum(placement_history(job).split) != job.spec.nodes:
        return None
    since = history.queued_at if history.queued_at is not None else cycle.now
    until = quantize(since + cycle.settings.same_zone_layout_seconds)
    return until if until > cycle.now else None


__all__ = [
    "is_crash_looping",
    "node_requirements",
    "placement_history",
    "placement_options",
    "zone_layout_deadline",
]

"""Requirements of a waiting job on its nodes: class, zone, history, zone layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine.ordering import is_crash_looping
from flyer.engine.placement import node_selection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine.placement.node_selection import PlacementHistory, PlacementOption
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


def node_requirements(job: JobState) -> tuple[str | None, str | None, int]:
    """The requirements that a single node has to satisfy."""
    return job.spec.node_class, job.spec.zone, job.spec.ranks_per_node


def placement_history(job: JobState) -> PlacementHistory:
    """Placement history of the job."""
    history = job.status.history
    return node_selection.PlacementHistory(
        tuple((node.name, node.zone) for node in history.previous), frozenset(history.avoid)
    )


def placement_options(
    cycle: CycleState, job: JobState, zones: Iterable[str], *, same_zone_layout: bool
) -> list[list[PlacementOption]]:
    """Placement options by kind, the best first; only the previous layout if requested."""
    zone_names = set(zones)
    crossing = cycle.may_cross(job)
    history = placement_history(job)
    like_before: list[PlacementOption] = []
    if sum(history.split) == job.spec.nodes:
        like_before = [
            same_zone_layout_option
            for same_zone_layout_option in node_selection.same_zone_layout_options(
                history, zone_names
            )
            if crossing or not same_zone_layout_option.crosses
        ]
    if same_zone_layout:
        return [like_before]
    single = node_selection.single_zone_options(job.spec.nodes, zone_names)
    cross = node_selection.cross_zone_options(job.spec.nodes, zone_names) if crossing else []
    return [kind for kind in (like_before, single, cross) if kind]


def zone_layout_deadline(cycle: CycleState, job: JobState) -> float | None:
    """Until when the job accepts only the zone layout of its checkpoint; None: any layout."""
    history = job.status.history
    if job.status.checkpoint is None or sum(placement_history(job).split) != job.spec.nodes:
        return None
    since = history.queued_at if history.queued_at is not None else cycle.now
    until = quantize(since + cycle.settings.same_zone_layout_seconds)
    return until if until > cycle.now else None


def needs_of(cycle: CycleState, job: JobState) -> tuple[object, ...]:
    """All requirements of a job on its nodes, except their number and its placement history."""
    spec = job.spec
    return (
        cycle.level(job), spec.node_class, spec.zone, spec.ranks_per_node, spec.cross_zone,
        spec.active_deadline, cycle.terms(job), is_crash_looping(cycle, job),
    )  # fmt: skip


__all__ = [
    "is_crash_looping",
    "node_requirements",
    "placement_history",
    "placement_options",
    "zone_layout_deadline",
]

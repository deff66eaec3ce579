"""Search for victims: the cheapest set of jobs whose preemption gives a job its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import scheduling_policy
from flyer.engine.placement import node_selection
from flyer.engine.placement.node_selection import PlacementOption, by_zone
from flyer.engine.placement.reservations import Reservation, is_reserved_for_others

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.state.jobs import JobState
    from flyer.engine.state.nodes import Node

# Above this size a greedy search replaces the exact one, so that a decision takes milliseconds.
_CELLS_MAX = 200_000


def preemption_plan(
    availability: NodeAvailability,
    job: JobState,
    nodes: Sequence[Node],
    kind: Sequence[PlacementOption],
    reservations: Sequence[Reservation],
    *,
    anyone: bool = False,
) -> tuple[tuple[Node, ...], tuple[str, ...]] | None:
    """The nodes and the cheapest victims, over the options of one kind.

    `anyone`: include jobs that are not preemptible, to suggest what a user could suspend.
    """
    victims = _victims(availability, job, anyone=anyone)
    if not victims:
        return None  # free nodes were tried before
    holders = set(availability.token_holders(job)[0])
    free = [
        node
        for node in nodes
        if availability.is_open(node)
        and not is_reserved_for_others(availability, job, node, reservations)
    ]
    reserved_names = _kept_for_others(availability, reservations)
    node_names = {node.name for node in nodes if node.name not in reserved_names}
    freed = {key: availability.freed_by(victim, node_names) for key, victim in victims.items()}
    plans: list[tuple[tuple[int, int, int, int], tuple[Node, ...], tuple[str, ...]]] = []
    for index, option in enumerate(kind):
        needed_holders = holders if option.crosses else set()
        if not needed_holders <= victims.keys():
            continue
        selection = _victims_for(availability, job, option, free, freed, needed_holders)
        if selection is None:
            continue
        pool = free + [node for key in selection for node in freed[key]]
        placement = node_selection.choose(
            option, by_zone(pool), availability.placement_history(job)
        )
        if placement is None:
            continue
        cost = sum(availability.cost_node_ms(victims[key]) for key in selection)
        remaining = len([node for node in pool if node.zone in option.zones]) - option.nodes
        plans.append(((cost, len(selection), remaining, index), placement, selection))
    if not plans:
        return None
    _, placement, selection = min(plans, key=lambda plan: plan[0])
    return placement, selection


def _kept_for_others(
    availability: NodeAvailability, reservations: Sequence[Reservation]
) -> set[str]:
    """Nodes reserved for other jobs: preempting a victim there would not help this job.

    Reservations of crash-looping jobs do not count: jobs of the same priority ignore them.
    """
    cycle = availability.cycle
    others_reservations = [
        reservation
        for reservation in reservations
        if not scheduling_policy.is_crash_looping(cycle, cycle.jobs[reservation.job])
    ]
    return {name for reservation in others_reservations for name in reservation.nodes}


def _victims(availability: NodeAvailability, job: JobState, *, anyone: bool) -> dict[str, JobState]:
    jobs = availability.cycle.jobs
    if anyone:
        running = [
            key for key in availability.reserving_jobs() if jobs[key].status.phase is Phase.RUNNING
        ]
        return {key: jobs[key] for key in running if key != job.key}
    keys, next_at = availability.victims(job)
    availability.cycle.wake(next_at)
    return {key: jobs[key] for key in keys}


def _victims_for(
    availability: NodeAvailability,
    job: JobState,
    option: PlacementOption,
    free: Sequence[Node],
    freed: dict[str, list[Node]],
    holders: set[str],
) -> tuple[str, ...] | None:
    cycle = availability.cycle
    candidates = [
        Candidate(
            key,
            availability.cost_node_ms(cycle.jobs[key]),
            sum(node.zone in option.zones for node in nodes),
        )
        for key, nodes in freed.items()
    ]
    candidates.sort(
        key=lambda candidate: (
            candidate.cost_node_ms, scheduling_policy.victim_order(cycle, cycle.jobs[candidate.job])
        )
    )  # fmt: skip
    if not option.crosses:
        in_zones = sum(node.zone in option.zones for node in free)
        cover = cheapest_cover(candidates, option.nodes - in_zones)
        return None if cover is None else tuple(sorted(victim.job for victim in cover))
    history = availability.placement_history(job)

    def enough(selection: Sequence[Candidate]) -> bool:
        if not holders <= {victim.job for victim in selection}:
            return False
        pool = list(free) + [node for victim in selection for node in freed[victim.job]]
        return node_selection.choose(option, by_zone(pool), history) is not None

    selection = cheapest_set(
        [candidate for candidate in candidates if candidate.gain or candidate.job in holders],
        enough,
    )
    return None if selection is None else tuple(sorted(match.job for match in selection))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that may be preempted, the cost of that, and how many required nodes it frees."""

    job: str
    cost_node_ms: int
    gain: int


def cheapest_cover(candidates: Sequence[Candidate], need: int) -> tuple[Candidate, ...] | None:
    """Of all sets that free `need` nodes the cheapest one, then the smallest one."""
    useful = [candidate for candidate in candidates if candidate.gain > 0]
    if sum(candidate.gain for candidate in useful) < need:
        return None
    if need <= 0:
        return ()
    if len(useful) * need > _CELLS_MAX:
        return cheapest_set(
            useful, lambda selection: sum(candidate.gain for candidate in selection) >= need
        )
    # cover[k]: the best set that frees at least k nodes, as (cost, size, positions).
    cover: list[tuple[int, int, tuple[int, ...]] | None] = [(0, 0, ())] + [None] * need
    for position, item in enumerate(useful):
        for count in range(need, 0, -1):
            rest = cover[max(0, count - item.gain)]
            if rest is None:
                continue
            better = (rest[0] + item.cost_node_ms, rest[1] + 1, (*rest[2], position))
            previous = cover[count]
            if previous is None or better < previous:
                cover[count] = better
    best = cover[need]
    assert best is not None, "the sum of gains covers the need"
    return tuple(useful[position] for position in best[2])


def cheapest_set(
    candidates: Sequence[Candidate], enough: Callable[[Sequence[Candidate]], bool]
) -> tuple[Candidate, ...] | None:
    """A small set for which `enough` holds: add the cheapest, then drop the most expensive."""
    selection: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda item: item.cost_node_ms):
        if enough(selection):
            break
        selection.append(candidate)
    if not enough(selection):
        return None
    for candidate in sorted(selection, key=lambda candidate: -candidate.cost_node_ms):
        without = [other for other in selection if other is not candidate]
        if enough(without):
            selection = without
    return tuple(selection)


__all__ = ["Candidate", "cheapest_cover", "cheapest_set", "preemption_plan"]

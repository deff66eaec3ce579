"""Allocation of nodes to one job: free nodes if possible, otherwise by preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine.placement import node_selection
from flyer.engine.placement.node_selection import (
    PlacementOption,
    by_zone,
    placement_options,
    zone_layout_deadline,
)
from flyer.engine.placement.reservations import (
    Reservation,
    is_ahead_of_its_turn,
    is_reserved_for_others,
)
from flyer.engine.scheduling_policy import in_refusal_cooldown, is_time_slice_over
from flyer.engine.state import transitions
from flyer.engine.state.jobs import ACTIVE, WAITING, JobState
from flyer.engine.victim_search import preemption_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.quota.admission import QuotaAdmission
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.nodes import Node


def allocate(
    availability: NodeAvailability,
    job: JobState,
    reservations: Sequence[Reservation],
    admission: QuotaAdmission,
) -> bool:
    """Reserve nodes for the job, by preemption if necessary; False if there are none now.

    Nodes on which it or other jobs failed are used only if the others do not suffice.
    """
    cycle = availability.cycle
    classes = [
        nodes for nodes in availability.classes(job) if admission.admits(job, nodes[0].node_class)
    ]
    deadline = zone_layout_deadline(cycle, job)
    if deadline is not None:
        cycle.wake(deadline)
    avoid = availability.placement_history(job).avoid
    trusted = [[node for node in nodes if node.name not in avoid] for nodes in classes]
    ways = [[nodes for nodes in trusted if nodes], classes] if avoid else [classes]
    for nodes in ways:
        if _place_on(availability, job, nodes, reservations, same_zone_layout=deadline is not None):
            return True
        if job.key in cycle.delayed_preemptions:
            return False
    return False


def _place_on(
    availability: NodeAvailability,
    job: JobState,
    classes: Sequence[Sequence[Node]],
    reservations: Sequence[Reservation],
    *,
    same_zone_layout: bool,
) -> bool:
    cycle = availability.cycle
    ways = [
        (nodes, kind)
        for nodes in classes
        for kind in placement_options(
            cycle, job, {node.zone for node in nodes}, same_zone_layout=same_zone_layout
        )
    ]
    for nodes, kind in ways:
        chosen_nodes = _fit_free(availability, job, nodes, kind, reservations)
        if chosen_nodes is not None:
            early = is_ahead_of_its_turn(availability, job, chosen_nodes, reservations)
            transitions.reserve(cycle, job.key, chosen_nodes, backfill=early)
            availability.reserved(job.key)
            return True
    if in_refusal_cooldown(cycle, job):
        return False
    if same_zone_layout and _fits_otherwise(availability, job, classes, reservations):
        return False  # free nodes will do once it stops waiting for the zone layout
    for nodes, kind in ways:
        plan = preemption_plan(availability, job, nodes, kind, reservations)
        if plan is not None:
            if _too_early(cycle, job, plan[1]):
                cycle.delayed_preemptions.add(job.key)
                return False
            early = is_ahead_of_its_turn(availability, job, plan[0], reservations)
            _preempt(availability, job, *plan, backfill=early)
            availability.refresh()
            return True
    return False


def _preempt(
    availability: NodeAvailability,
    job: JobState,
    nodes: tuple[Node, ...],
    victims: tuple[str, ...],
    *,
    backfill: bool,
) -> None:
    """Reserve the nodes for the job, and evict the victims from them.

    A victim that has only reserved nodes loses the reservation, and no work. A job that already
    leaves these nodes continues to leave them.
    """
    cycle = availability.cycle
    for key in victims:
        victim = cycle.jobs[key]
        over = is_time_slice_over(cycle, job, victim)
        if victim.status.phase in WAITING:
            transitions.drop_reservation(cycle, key)
            continue
        why = f"preempted by {job.key} of {job.user} (priority {job.spec.priority})"
        if over:
            why = f"its time slice is over: {job.key} of {job.user} has its turn"
        transitions.request_suspension(cycle, key, reason="Preempted", by=job.key, message=why)
        if over:
            transitions.end_time_slice(cycle, key)
        elif victim.user != job.user:  # else users could protect their own jobs by preempting them
            transitions.count_preemption(cycle, key)
    transitions.reserve(cycle, job.key, nodes, backfill=backfill)


def _fits_otherwise(
    availability: NodeAvailability,
    job: JobState,
    classes: Sequence[Sequence[Node]],
    reservations: Sequence[Reservation],
) -> bool:
    """Whether free nodes suffice in another zone layout than that of the checkpoint."""
    return any(
        _fit_free(availability, job, nodes, kind, reservations) is not None
        for nodes in classes
        for kind in placement_options(
            availability.cycle, job, {node.zone for node in nodes}, same_zone_layout=False
        )
    )


def _too_early(cycle: CycleState, job: JobState, victims: Sequence[str]) -> bool:
    """Whether running jobs would be preempted before the job has waited for the delay."""
    if not any(cycle.jobs[key].status.phase in ACTIVE for key in victims):
        return False
    queued_at = job.status.history.queued_at
    since = queued_at if queued_at is not None else cycle.now
    return not cycle.passed(since + cycle.settings.preemption_delay_seconds)


def _fit_free(
    availability: NodeAvailability,
    job: JobState,
    nodes: Sequence[Node],
    kind: Sequence[PlacementOption],
    reservations: Sequence[Reservation],
) -> tuple[Node, ...] | None:
    """Unreserved nodes: empty ones or its own if they suffice, otherwise also nodes being left."""
    keeping, leaving = availability.token_holders(job)
    open_nodes = availability.open_of(nodes)
    if reservations:
        open_nodes = [
            node
            for node in open_nodes
            if not is_reserved_for_others(availability, job, node, reservations)
        ]
    empty = [
        node for node in open_nodes if availability.occupied_by.get(node.name) in (None, job.key)
    ]
    for candidates, token_free in ((empty, not leaving), (open_nodes, True)):
        usable = [option for option in kind if not option.crosses or (token_free and not keeping)]
        best = node_selection.best(usable, by_zone(candidates), availability.placement_history(job))
        if best is not None:
            return best[1]
    return None


__all__ = ["allocate"]

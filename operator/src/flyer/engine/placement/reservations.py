"""Backfill reservations: the nodes that blocked jobs wait for, and from when they need them.

Other jobs may use reserved nodes if they release them in time: because their `activeDeadline` ends
earlier, or because they can be preempted earlier. Every job behind the owner of a reservation can
be preempted: a job of a lower priority by its level, a job of the same priority because it is
marked as backfill. A reservation without a known time (a job of a higher priority without
`activeDeadline` is ahead) keeps no node empty. A reservation with a known time keeps nodes empty
only in the last minutes, when no job could release them in time. A job that is started on reserved
nodes never moves the time of the reservation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine.placement import node_selection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.engine.placement.availability import AvailableAt, NodeAvailability
    from flyer.engine.state.jobs import JobState
    from flyer.engine.state.nodes import Node


@dataclass(frozen=True, slots=True)
class Reservation:
    """Backfill reservation: the nodes that a blocked job waits for."""

    job: str
    nodes: frozenset[str]
    needed_at: float  # infinite: unknown


def is_reserved_for_others(
    availability: NodeAvailability, job: JobState, node: Node, reservations: Sequence[Reservation]
) -> bool:
    """Whether using this node could delay a job ahead that has reserved it."""
    if not any(node.name in reservation.nodes for reservation in reservations):
        return False
    if not availability.is_empty(node):
        return True
    soonest = min(_ends_at(availability, job), _gives_way_at(availability, job))
    return any(
        soonest > reservation.needed_at
        for reservation in reservations
        if node.name in reservation.nodes
    )


def is_ahead_of_its_turn(
    availability: NodeAvailability,
    job: JobState,
    nodes: Sequence[Node],
    reservations: Sequence[Reservation],
) -> bool:
    """Whether a job ahead has reserved some of these nodes and may have to preempt this one."""
    ends_at = _ends_at(availability, job)
    names = {node.name for node in nodes}
    return any(
        # Without a known time it is unknown whether the job has ended by then.
        reservation.nodes & names
        and (math.isinf(reservation.needed_at) or ends_at > reservation.needed_at)
        for reservation in reservations
    )


def _ends_at(availability: NodeAvailability, job: JobState) -> float:
    """When the job, if started now, has ended by itself."""
    cycle, runtime = availability.cycle, job.spec.active_deadline
    if runtime is None:
        return math.inf
    started_at = cycle.now + cycle.settings.start_deadline_seconds
    return started_at + runtime.seconds + cycle.terms(job).max_checkpoint_grace_period


def _gives_way_at(availability: NodeAvailability, job: JobState) -> float:
    """When the job, if started now, has released its nodes after a preemption."""
    cycle, terms = availability.cycle, availability.cycle.terms(job)
    started_at = cycle.now + cycle.settings.start_deadline_seconds
    return started_at + terms.min_runtime + terms.max_checkpoint_grace_period


def reservation_for(
    availability: NodeAvailability,
    job: JobState,
    reservations: Sequence[Reservation],
    admits: Callable[[str], bool] = lambda _: True,
) -> Reservation | None:
    """The nodes that the blocked job can have first, and when; None: there are none.

    `admits` says of which classes of nodes the job may have some.
    """
    reserved_names = {name for reservation in reservations for name in reservation.nodes}
    best: tuple[float, int, tuple[str, ...], frozenset[str]] | None = None
    count = job.spec.nodes
    for nodes in availability.classes(job):
        if not admits(nodes[0].node_class):
            continue
        zones = sorted({node.zone for node in nodes})
        pools: list[tuple[str, ...]] = [(zone,) for zone in zones]
        if availability.cycle.may_cross(job):
            pools += [
                cross_zone_option.zones
                for cross_zone_option in node_selection.cross_zone_options(count, zones)
            ]
        for pool in pools:
            times = _first(
                availability.available_times(job, nodes, pool),
                reserved_names,
                count,
                availability.cycle.now,
            )
            if times is None:
                continue
            rank = (times[0], times[1], pool, times[2])
            # One zone is better than two, unless two are available earlier.
            if best is None or (rank[0], len(rank[2]), *rank[1:3]) < (
                best[0], len(best[2]), *best[1:3],
            ):  # fmt: skip
                best = rank
    if best is None:
        return None
    needed_at = best[0] if math.isinf(best[0]) else quantize(best[0])
    return Reservation(job.key, best[3], needed_at)


def _first(
    times: Sequence[AvailableAt], reserved_names: set[str], count: int, now: float
) -> tuple[float, int, frozenset[str]] | None:
    """The first `count` untaken nodes: their time, minus the number of free ones, and names."""
    first = list(islice((time for time in times if time[1] not in reserved_names), count))
    if len(first) < count:
        return None
    needed_at = first[-1][0]
    # If the time is known, leave free nodes to other jobs as long as later ones suffice.
    if math.isfinite(needed_at):
        in_time = reversed(times[: bisect_right(times, needed_at, key=_at)])
        first = list(islice((time for time in in_time if time[1] not in reserved_names), count))
    free = times[: bisect_right(times, now, key=_at)]
    free_now = sum(time[1] not in reserved_names for time in free)
    return needed_at, -free_now, frozenset(name for _, name in first)


def _at(timed: AvailableAt) -> float:
    return timed[0]


__all__ = ["Reservation", "is_ahead_of_its_turn", "is_reserved_for_others", "reservation_for"]

"""Eviction of victims: suspend running jobs, drop reservations, and reserve the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine import ordering
from flyer.engine.state import transitions
from flyer.engine.state.jobs import WAITING, JobState

if TYPE_CHECKING:
    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.state.nodes import Node


def preempt(
    availability: NodeAvailability,
    job: JobState,
    nodes: tuple[Node, ...],
    victims: tuple[str, ...],
    *,
    backfill: bool = False,
) -> None:
    """Reserve the nodes for the job, and evict the victims from them.

    A victim that has only reserved nodes loses the reservation, and no work. A job that already
    leaves these nodes continues to leave them.
    """
    cycle = availability.cycle
    for key in victims:
        victim = cycle.jobs[key]
        over = ordering.is_time_slice_over(cycle, job, victim)
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


__all__ = ["preempt"]

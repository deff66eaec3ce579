"""Superseded reservations: stored statuses of two jobs that reserve one node.

The engine reserves a node for one job at a time. But a status may be older than another one: that
of an object that was gone, and came back as it was while no scheduler observed it. A node is
reserved again only after the earlier job has left it, so the latest reservation is the valid one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine.state import restarts
from flyer.engine.state.jobs import RESERVING

if TYPE_CHECKING:
    from flyer.engine.state.cycle_state import CycleState

__all__ = ["resubmit_superseded"]


def resubmit_superseded(cycle: CycleState) -> None:
    """Queue the jobs again whose nodes were reserved for others since. For rebuilt states."""
    reserving = [
        (job.status.assignment.reserved_at, key, job.status.assignment)
        for key, job in cycle.active_jobs().items()
        if job.status.phase in RESERVING and job.status.assignment is not None
    ]
    taken: set[str] = set()
    for _, key, assignment in sorted(reserving, key=lambda item: item[:2], reverse=True):
        if taken.isdisjoint(assignment.names):
            taken.update(assignment.names)
            continue
        left = [node for node in cycle.jobs[key].status.occupied if node.name not in taken]
        restarts.resubmit(cycle, key, left)

"""What one pass over the queue has found out, so that nobody asks for it twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine import blockers
from flyer.engine.allocation import was_refused
from flyer.engine.asks import node_requirements, zone_layout_deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import Pending
    from flyer.engine.market import NodeAvailability
    from flyer.engine.reservations import Reservation
    from flyer.engine.state import JobState


class UnschedulableNeeds:
    """Needs for which no nodes were found since nodes were last given out.

    What a job remembers of its nodes (the last part of its needs) decides which nodes it gets, but
    not whether it gets any: with fewer or other wishes than another one, it finds no more nodes.
    Claims are only added, and a later place in the queue has no more victims. Not comparable is a
    job that waits for the split of its checkpoint, or may not preempt.
    """

    def __init__(self, availability: NodeAvailability) -> None:
        self._availability = availability
        self._cycle = availability.cycle
        self._least: dict[tuple[object, ...], int] = {}

    def is_unschedulable(self, job: JobState, needs: tuple[object, ...]) -> bool:
        """Whether no nodes would be found for the job: too few can be had, or as for another."""
        if zone_layout_deadline(self._cycle, job) is not None:
            return False
        least = self._least.get(needs[:-1])
        if least is not None and least <= job.spec.nodes:
            return True
        return self._availability.largest_gang(job) < job.spec.nodes

    def failed(self, job: JobState, needs: tuple[object, ...]) -> None:
        """No nodes were found for the job."""
        cycle = self._cycle
        partial = (
            job.key in cycle.delayed_preemptions or zone_layout_deadline(cycle, job) is not None
        )
        if not partial and not was_refused(cycle, job):
            least = self._least.get(needs[:-1], job.spec.nodes)
            self._least[needs[:-1]] = min(least, job.spec.nodes)

    def clear(self) -> None:
        """Nodes were given out."""
        self._least.clear()


class PendingReasonCache:
    """Why jobs were not placed: in the same words for those that want the same nodes.

    How long a job may run, how it may be preempted and which nodes it remembers are not in these
    words, unless it waits for the split of its checkpoint. Not comparable is a job that still
    occupies nodes, or waits for some of its own.
    """

    def __init__(self, availability: NodeAvailability) -> None:
        self._availability = availability
        self._known: dict[tuple[object, ...], Pending] = {}

    def of(
        self,
        job: JobState,
        reservations: Sequence[Reservation],
        own: Sequence[Reservation],
        eta: float | None,
    ) -> Pending:
        """Why the job was not placed. `own`: its reservations."""
        availability = self._availability
        if own or job.status.occupied or zone_layout_deadline(availability.cycle, job) is not None:
            return blockers.pending(availability, job, reservations, eta)
        spec, level = job.spec, availability.cycle.level(job)
        key = (level, *node_requirements(job), spec.cross_zone, spec.nodes, len(reservations))
        if key not in self._known:
            self._known[key] = blockers.pending(availability, job, reservations, eta)
        return self._known[key]

    def clear(self) -> None:
        """Nodes were given out."""
        self._known.clear()


__all__ = ["PendingReasonCache", "UnschedulableNeeds"]

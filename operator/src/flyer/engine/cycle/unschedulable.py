"""Cache of a scheduling pass: requirements for which no nodes were found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine.ordering import in_refusal_cooldown
from flyer.engine.placement.requirements import zone_layout_deadline

if TYPE_CHECKING:
    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.state.jobs import JobState


class UnschedulableNeeds:
    """Requirements for which no nodes were found since the last allocation.

    The placement history of a job (the last part of its needs) decides which nodes it gets, but not
    whether it gets any. Reservations are only added, and a later position in the queue has no more
    victims, so a job with equal needs and as many nodes gets none either. A job that waits for the
    zone layout of its checkpoint, or may not preempt, is not comparable.
    """

    def __init__(self, availability: NodeAvailability) -> None:
        self._availability = availability
        self._cycle = availability.cycle
        self._least: dict[tuple[object, ...], int] = {}

    def is_unschedulable(self, job: JobState, requirements: tuple[object, ...]) -> bool:
        """Whether no nodes can be found: too few are available, or a comparable job found none."""
        if zone_layout_deadline(self._cycle, job) is not None:
            return False
        least = self._least.get(requirements[:-1])
        if least is not None and least <= job.spec.nodes:
            return True
        return self._availability.largest_gang(job) < job.spec.nodes

    def failed(self, job: JobState, requirements: tuple[object, ...]) -> None:
        """Record that no nodes were found for the job."""
        cycle = self._cycle
        partial = (
            job.key in cycle.delayed_preemptions or zone_layout_deadline(cycle, job) is not None
        )
        if not partial and not in_refusal_cooldown(cycle, job):
            least = self._least.get(requirements[:-1], job.spec.nodes)
            self._least[requirements[:-1]] = min(least, job.spec.nodes)

    def clear(self) -> None:
        """Clear the cache after an allocation."""
        self._least.clear()


__all__ = ["UnschedulableNeeds"]

"""What one pass over the queue has found out, so that nobody asks for it twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine.ordering import in_refusal_cooldown
from flyer.engine.placement.requirements import zone_layout_deadline

if TYPE_CHECKING:
    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.state.jobs import JobState


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
        if not partial and not in_refusal_cooldown(cycle, job):
            least = self._least.get(needs[:-1], job.spec.nodes)
            self._least[needs[:-1]] = min(least, job.spec.nodes)

    def clear(self) -> None:
        """Nodes were given out."""
        self._least.clear()


__all__ = ["UnschedulableNeeds"]

"""Remedies: what a user could do so that a waiting job gets nodes (`status.pending.unblock`).

Jobs with equal requirements have equal remedies. Finding them is the slowest part of a status, so
they are cached, and a scheduling pass searches for few new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import scheduling_policy
from flyer.engine.placement.node_selection import node_requirements, placement_options
from flyer.engine.state.explanation import Remedy
from flyer.engine.victim_search import preemption_plan

if TYPE_CHECKING:
    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.state.jobs import JobState

# Searches per scheduling pass, and after each allocation.
_SEARCHES_MAX = 1
_KEPT_SECONDS = 30.0


class RemedySearch:
    """Remedies of one scheduling pass, and the cached ones of earlier passes."""

    def __init__(self, availability: NodeAvailability) -> None:
        self._availability = availability
        self._cycle = availability.cycle
        self._left = _SEARCHES_MAX
        # Remedies and the time of their search, by the nodes that a job requires.
        self._known = dict(self._cycle.remedies)

    def is_available(self, job: JobState) -> bool:
        """Whether the remedies are cached, or may be searched for in this pass."""
        return self._left > 0 or self._kept(job) is not None

    def of(self, job: JobState) -> tuple[Remedy, ...]:
        """The remedies of the job, the cheapest first."""
        remedies = self._kept(job)
        if remedies is None:
            self._left -= 1
            remedies = _found(self._availability, job)
            self._known[self._wants(job)] = (self._cycle.now, remedies)
        return remedies

    def clear(self) -> None:
        """Clear the cache after an allocation."""
        self._known.clear()
        self._left = _SEARCHES_MAX

    def close(self) -> None:
        """Finish the pass and keep only entries used in it."""
        fresh = {
            requirements: entry
            for requirements, entry in self._known.items()
            if self._is_fresh(entry[0])
        }
        self._cycle.remedies = fresh

    def _kept(self, job: JobState) -> tuple[Remedy, ...] | None:
        found_at, remedies = self._known.get(self._wants(job), (None, ()))
        if found_at is None or not self._is_fresh(found_at):
            return None
        return remedies if all(self._holds(remedy) for remedy in remedies) else None

    def _is_fresh(self, found_at: float) -> bool:
        if self._cycle.explained_job:  # for `explain` only results of this pass count
            return found_at == self._cycle.now
        return self._cycle.now - found_at < _KEPT_SECONDS

    def _holds(self, remedy: Remedy) -> bool:
        """Whether the jobs to suspend are running, or the node is still unavailable."""
        cycle = self._cycle
        if remedy.node:
            state = cycle.nodes.get(remedy.node)
            return state is not None and not state.eligible
        jobs = (cycle.jobs.get(key) for key in remedy.jobs)
        return all(job is not None and job.status.phase is Phase.RUNNING for job in jobs)

    def _wants(self, job: JobState) -> tuple[object, ...]:
        spec, level = job.spec, self._cycle.level(job)
        return (
            spec.nodes,
            *node_requirements(job),
            spec.cross_zone,
            level,
            tuple(job.status.history.avoid),
        )


def _found(availability: NodeAvailability, job: JobState) -> tuple[Remedy, ...]:
    """Search for remedies, the cheapest first."""
    remedies: list[Remedy] = []
    cycle = availability.cycle
    for nodes in availability.classes(job):
        zones = {node.zone for node in nodes}
        for kind in placement_options(cycle, job, zones, same_zone_layout=False):
            plan = preemption_plan(availability, job, nodes, kind, (), anyone=True)
            if plan is None or not plan[1]:
                continue
            victims = plan[1]
            lost_node_ms = sum(
                scheduling_policy.lost_node_ms(cycle, cycle.jobs[key]) for key in victims
            )
            text = "; ".join(f"flyer suspend {key}" for key in victims)
            remedies.append(
                Remedy(text, "frees the nodes once it has saved", lost_node_ms / 1000, jobs=victims)
            )
    outs = [
        Remedy("", f"brings back {node.name}", node=node.name)
        for nodes in availability.classes(job)
        for node in nodes
        if not availability.cycle.nodes[node.name].eligible
    ]
    unique = {match.command: match for match in remedies}
    ordered = sorted(
        unique.values(), key=lambda remedy: (remedy.cost_node_seconds or 0.0, remedy.command)
    )
    return (*ordered, *outs)


__all__ = ["RemedySearch"]

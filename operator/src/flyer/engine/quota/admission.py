"""Quota admission during a scheduling cycle, in the order of the queue.

A job without room in a quota waits, and so do later jobs of the same account in that quota. A job
that has room but gets no nodes keeps its share of the quota while it is ahead. An `auto` job is
admitted at the highest of its allowed priorities that has room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.api import Pending, Priority
from flyer.engine.quota.snapshot import (
    QuotaSnapshot,
    active_quotas,
    quota_snapshot,
    subjects_of,
)
from flyer.engine.state.quotas import ANY, Quota

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


@dataclass(slots=True)
class QuotaAdmission:
    """Quota admission of one scheduling pass."""

    availability: NodeAvailability
    snapshot: QuotaSnapshot = field(init=False)
    _levels: dict[str, list[Priority]] = field(default_factory=dict)
    _verdicts: dict[tuple[object, ...], Pending | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.snapshot = quota_snapshot(self.availability.cycle)
        self._adopt_priorities()

    def _adopt_priorities(self) -> None:
        """Move running jobs to the priority of their specification once its quotas have room."""
        cycle = self.availability.cycle
        active = cycle.active_jobs()
        for key in sorted(active):
            job = active[key]
            requested, current = job.spec.priority, job.status.priority
            if not job.holding or requested in (Priority.AUTO, current):
                continue
            if not self.snapshot.quotas:
                cycle.update(key, priority=requested)
                continue
            node_class = self.snapshot.holdings[key].node_class
            if self.snapshot.first_full_quota(job, requested, node_class) is None:
                cycle.update(key, priority=requested)
                self.snapshot.charge(cycle.jobs[key], requested, node_class)

    @property
    def limited(self) -> bool:
        """Whether any quota applies now."""
        return bool(self.snapshot.quotas)

    def enter(self, job: JobState, level: int | None = None) -> None:
        """Select the priority of an `auto` job: the one at this level; None: the highest."""
        if self.snapshot.quotas and job.spec.priority is Priority.AUTO:
            levels = allowed_priorities(self.availability.cycle, job, self.snapshot.quotas)
            self._levels[job.key] = levels
            at = (priority for priority in levels if level is None or priority.level == level)
            self.availability.cycle.auto_priorities[job.key] = next(at, levels[0])

    def lower(self, job: JobState) -> bool:
        """Move an `auto` job without room to its next lower priority; False: it stays."""
        levels = self._levels.get(job.key)
        if levels is None or self._fits(job):
            return False
        cycle = self.availability.cycle
        at = levels.index(cycle.priority(job))
        if at + 1 == len(levels):
            # No priority has room: it waits at the default of `auto` or at the lowest one.
            own = cycle.settings.auto_priority
            cycle.auto_priorities[job.key] = own if own in levels else levels[-1]
            del self._levels[job.key]
            return False
        cycle.auto_priorities[job.key] = levels[at + 1]
        return True

    def never(self, job: JobState) -> Pending | None:
        """Why the quotas are too small for the job; None: they are not."""
        if not self.snapshot.quotas:
            return None
        spec, classes = job.spec, self._classes(job)
        requirement = (
            self.snapshot.subjects(job), spec.nodes, spec.priority, spec.node_class, *classes
        )  # fmt: skip
        if requirement not in self._verdicts:
            self._verdicts[requirement] = quota_exceeded(self.availability.cycle, job, classes)
        return self._verdicts[requirement]

    def refusal(self, job: JobState) -> Pending | None:
        """Why the job has to wait for room; None: it has room. It keeps its place in the quota."""
        if not self.snapshot.quotas or self._fits(job):
            return None
        cycle = self.availability.cycle
        violations = [
            quota
            for node_class in self._classes(job) or (job.spec.node_class,)
            if (quota := self.snapshot.first_full_quota(job, cycle.priority(job), node_class))
            is not None
        ]
        pending, reasons = self.snapshot.out_of_quota(job, violations[0])
        cycle.quota_blockers[job.key] = reasons
        for quota in violations:
            self.snapshot.wait_in(quota, job)
        return pending

    def admits(self, job: JobState, node_class: str) -> bool:
        """Whether the job may have nodes of this class."""
        if not self.snapshot.quotas:
            return True
        priority = self.availability.cycle.priority(job)
        return self.snapshot.first_full_quota(job, priority, node_class) is None

    def charges(self, job: JobState) -> bool:
        """Whether `fill` may reduce the room for other jobs."""
        if not self.snapshot.quotas:
            return False
        subjects, priority = self.snapshot.subjects(job), self.availability.cycle.priority(job)
        classes = self._classes(job) or (job.spec.node_class,)
        return any(self.snapshot.limits(subjects, priority, node_class) for node_class in classes)

    def fill(self, job: JobState) -> None:
        """Charge the job to its quotas, with nodes or without."""
        if not self.snapshot.quotas:
            return
        job = self.availability.cycle.jobs[job.key]
        assignment = job.status.assignment
        node_class = assignment.node_class if assignment is not None else job.spec.node_class
        self.snapshot.charge(job, self.availability.cycle.priority(job), node_class)

    def _fits(self, job: JobState) -> bool:
        """Whether a node class with enough nodes has room in its quotas."""
        classes = self.availability.classes(job)
        large = [nodes for nodes in classes if len(nodes) >= job.spec.nodes] or classes
        return any(self.admits(job, nodes[0].node_class) for nodes in large)

    def _classes(self, job: JobState) -> list[str]:
        return [nodes[0].node_class for nodes in self.availability.classes(job)]


def allowed_priorities(cycle: CycleState, job: JobState, quotas: Iterable[Quota]) -> list[Priority]:
    """The priorities at which the job may run, the highest first.

    `auto` allows every priority that a quota of the job names, and the default of `auto`.
    """
    if job.spec.priority is not Priority.AUTO:
        return [job.spec.priority]
    subjects = subjects_of(job, cycle.teams)
    named = {
        Priority(quota.priority)
        for quota in quotas
        if quota.priority != ANY and quota.concerns(subjects)
        and (job.spec.node_class is None or quota.node_class in (ANY, job.spec.node_class))
    } | {cycle.settings.auto_priority}  # fmt: skip
    return sorted(named, key=lambda quota: -quota.level)


def quota_exceeded(cycle: CycleState, job: JobState, classes: Sequence[str]) -> Pending | None:
    """Why the quotas are too small for the job even if no job held nodes; None: they are not."""
    snapshot = QuotaSnapshot(active_quotas(cycle), teams=cycle.teams)
    if not snapshot.quotas:
        return None
    subjects = snapshot.subjects(job)
    tightest: list[tuple[Quota, Priority]] = []
    for priority in allowed_priorities(cycle, job, snapshot.quotas):
        for node_class in classes or (job.spec.node_class,):
            limits = snapshot.limits(subjects, priority, node_class)
            least = min(limits, key=lambda limit: (limit.nodes, limit.name), default=None)
            if least is None or least.nodes >= job.spec.nodes:
                return None
            tightest.append((least, priority))
    if not tightest:
        return None
    quota, priority = max(tightest, key=lambda item: (item[0].nodes, item[1].level, item[0].name))
    level = f"priority {quota.priority}" if quota.priority != ANY else "any priority"
    where = f"node class {quota.node_class}" if quota.node_class != ANY else "all node classes"
    fewer = f"set spec.nodes to {quota.nodes} or less, " if quota.nodes else ""
    return Pending(
        verdict="Never",
        reason="QuotaExceeded",
        message=f"wants {job.spec.nodes} nodes, quota {quota.name} gives "
        f"{quota.subject_name(subjects)} {quota.nodes or 'none'} at {level} in {where}: {fewer}"
        f"choose another priority or node class, or ask for a larger FlyerQuota {quota.name}",
    )


__all__ = ["QuotaAdmission", "allowed_priorities", "quota_exceeded"]

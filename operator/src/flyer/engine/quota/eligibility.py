"""Eligibility for quotas: the priorities a job may use, and whether any quota is large enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Pending, Priority
from flyer.engine.quota.snapshot import QuotaSnapshot, active_quotas, subjects_of
from flyer.engine.state.quotas import ANY, Quota

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


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


__all__ = ["allowed_priorities", "quota_exceeded"]

"""Usage of each quota, for the statuses of FlyerQuotas. Linear in the number of jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.api.waiting import WAITING_FOR_QUOTA
from flyer.engine.quota.snapshot import QuotaSnapshot, quota_snapshot
from flyer.engine.state.cycle_state import CycleState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.engine.state.engine_state import EngineState
    from flyer.engine.state.jobs import JobState
    from flyer.engine.state.quotas import Quota


@dataclass(slots=True)
class QuotaUsage:
    """Current usage of one quota."""

    held: dict[str, list[int]] = field(default_factory=dict)  # by subject: the nodes of each job
    waiting: int = 0  # number of jobs that wait for room


def quota_usage(state: EngineState, now: float) -> dict[str, QuotaUsage]:
    """Usage of every quota that applies now, by name."""
    cycle = CycleState(state, now)
    snapshot = quota_snapshot(cycle)
    usage = {quota.name: QuotaUsage() for quota in snapshot.quotas}
    for holding in snapshot.holdings.values():
        for quota in snapshot.limits(holding.subjects, holding.priority, holding.node_class):
            name = holding.subjects.of(quota.kind)
            usage[quota.name].held.setdefault(name, []).append(holding.nodes)
    waiting: dict[str, set[str]] = {name: set() for name in usage}
    jobs = [job for job in cycle.jobs.values() if _waits(job)] if usage else []
    # The second pass finds jobs that have room, but wait behind others of their account.
    for _ in range(2):
        for job in jobs:
            for quota in _full_quotas(cycle, snapshot, job):
                snapshot.wait_in(quota, job)
                waiting[quota.name].add(job.key)
    for name, keys in waiting.items():
        usage[name].waiting = len(keys)
    return usage


def _waits(job: JobState) -> bool:
    status = job.status
    return (
        status.phase is Phase.QUEUED
        and status.pending is not None
        and status.pending.reason == WAITING_FOR_QUOTA
    )


def _full_quotas(cycle: CycleState, snapshot: QuotaSnapshot, job: JobState) -> Iterator[Quota]:
    required_class = job.spec.node_class
    classes = (
        {required_class}
        if required_class is not None
        else {node.node.node_class for node in cycle.nodes.values()}
    )
    for node_class in sorted(classes):
        quota = snapshot.first_full_quota(job, cycle.priority(job), node_class)
        if quota is not None:
            yield quota


__all__ = ["QuotaUsage", "quota_usage"]

"""Liveness check: finds jobs that wait although they could run, without the scheduler's rules.

A job could run if it fits on healthy, empty, unassigned nodes of one class in one zone, and no
quota, pause or refusal of the job prevents it. Nodes that a job ahead of it is certain to get
within a known time count as reserved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.api.waiting import PODS_REFUSED
from flyer.engine.cycle.schedule import schedule
from flyer.engine.quota.snapshot import active_quotas, subjects_of
from flyer.engine.state.cycle_state import CycleState

if TYPE_CHECKING:
    from flyer.engine import EngineState, JobState

__all__ = ["idle_although_wanted"]


def idle_although_wanted(state: EngineState, now: float) -> dict[str, str]:
    """The jobs that wait without a reason, and the nodes that each of them could use."""
    problems: dict[str, str] = {}
    cycle = CycleState(state, now)
    taken_nodes = {*cycle.reserved_by(), *cycle.occupied_by()}
    reservations = schedule(CycleState(state, now))
    for key in sorted(state.jobs):
        job = state.jobs[key]
        if not _waits_for_nodes(cycle, job):
            continue
        places: dict[tuple[str, str], list[str]] = {}
        gone_at = _gone_at(cycle, job)
        promised = {
            name
            for reservation in reservations
            if reservation.needed_at < gone_at
            for name in reservation.nodes
        }
        for node in cycle.usable_nodes(job):
            if state.nodes[node.name].eligible and node.name not in taken_nodes | promised:
                places.setdefault((node.node_class, node.zone), []).append(node.name)
        for (node_class, _), names in places.items():
            if len(names) >= job.spec.nodes and _has_quota(cycle, job, node_class):
                problems[key] = f"{key} waits ({job.status.pending}) although {names} are free"
    return problems


def _gone_at(cycle: CycleState, job: JobState) -> float:
    """When the job, started now, has released its nodes after the earliest possible request."""
    preemption, settings = job.spec.preemption, cycle.settings
    runs = preemption.min_runtime.seconds + preemption.max_checkpoint_grace_period.seconds
    return cycle.now + settings.start_deadline_seconds + runs


def _has_quota(cycle: CycleState, job: JobState, node_class: str) -> bool:
    """Whether every limit that may apply has room for the job and all others that wait for it."""
    subjects = subjects_of(job, cycle.teams)
    for quota in active_quotas(cycle):
        if not quota.concerns(subjects) or quota.node_class not in ("*", node_class):
            continue
        required = sum(
            other.spec.nodes
            for other in cycle.jobs.values()
            if not other.ended
            and quota.account(subjects_of(other, cycle.teams)) == quota.account(subjects)
        )
        if required > quota.nodes:
            return False
    return True


def _waits_for_nodes(cycle: CycleState, job: JobState) -> bool:
    status = job.status
    if status.phase is not Phase.QUEUED or job.removed or job.suspend:
        return False
    not_before, eviction = status.history.not_before, status.eviction
    if not_before is not None and not_before > cycle.now:
        return False
    return eviction is None or eviction.reason != PODS_REFUSED

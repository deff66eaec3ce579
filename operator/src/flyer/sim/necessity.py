"""Necessity of preemptions: finds jobs that a step preempted without need.

It compares the states before and after the step, without the scheduler's rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine.placement.availability import NodeAvailability
from flyer.engine.scheduling_policy import queue_position
from flyer.engine.state.cycle_state import CycleState
from flyer.engine.state.jobs import ACTIVE, RESERVING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from flyer.engine import EngineState, JobState

__all__ = ["preempted_in_vain"]


def preempted_in_vain(before: EngineState, after: EngineState) -> str:
    """The first job that this step preempted without need; empty: none.

    1. The preemptor has nodes in the same step, at least one of them the victim's, or the
       cross-zone token that the victim held.
    2. The preemptor has waited for the delay in the settings.
    3. The first job of the queue preempts only where no zone has enough free nodes. Those that a
       later job has freed by preempting in the same step are not counted.
    """
    victims: dict[str, list[JobState]] = {}
    for key, job in after.jobs.items():
        old = before.jobs.get(key)
        suspension = job.status.suspension
        if (
            old is None
            or old.status.phase not in ACTIVE
            or job.status.phase is not Phase.SUSPENDING
            or suspension is None
            or suspension.reason != "Preempted"
        ):
            continue
        why = _unused(after, old, suspension.by)
        if why:
            return why
        victims.setdefault(suspension.by, []).append(old)
    victim_nodes = {name for items in victims.values() for item in items for name in _names(item)}
    for by in victims:
        why = _too_early(after, after.jobs[by]) or _unneeded(before, after, by, victim_nodes)
        if why:
            return why
    return ""


def _unused(after: EngineState, victim: JobState, by: str) -> str:
    starter = after.jobs.get(by)
    assignment = starter.status.assignment if starter is not None else None
    if starter is None or starter.status.phase not in RESERVING or assignment is None:
        return f"{victim.key} was preempted by {by}, which has no nodes"
    victim_assignment = victim.status.assignment
    assert victim_assignment is not None, victim.key
    shared = set(victim_assignment.names) & set(assignment.names)
    token = len(victim_assignment.zones) > 1 and len(assignment.zones) > 1
    return "" if shared or token else f"{victim.key} was preempted by {by}, which has other nodes"


def _too_early(after: EngineState, starter: JobState) -> str:
    queued_at = starter.status.history.queued_at
    waited = after.now - (queued_at if queued_at is not None else after.now)
    if waited < after.settings.preemption_delay_seconds - 0.001:
        return f"{starter.key} preempts after {waited} s"
    return ""


def _unneeded(
    before: EngineState, after: EngineState, by: str, victim_nodes: AbstractSet[str]
) -> str:
    starter, cycle = after.jobs[by], CycleState(after, after.now)
    place = queue_position(cycle, starter)
    ahead = [
        key
        for key, job in after.jobs.items()
        if key != by and not job.ended and queue_position(cycle, job) < place
        and (_waited(job) or _waited(before.jobs.get(key, job)))
    ]  # fmt: skip
    if ahead:
        return ""  # nodes may be reserved for them
    availability = NodeAvailability(cycle)
    avoid = availability.placement_history(starter).avoid
    own = starter.status.assignment
    assert own is not None, by
    free: dict[tuple[str, str], list[str]] = {}
    for nodes in availability.classes(starter):
        for node in nodes:
            becomes_free = node.name in own.names and node.name not in victim_nodes
            was_free = availability.is_open(node) and node.name not in victim_nodes
            if (becomes_free or was_free) and node.name not in avoid:
                free.setdefault((node.node_class, node.zone), []).append(node.name)
    for (node_class, _), names in free.items():
        if len(names) >= starter.spec.nodes and node_class == own.node_class:
            return f"a job was preempted by {by}, for which {names} were free"
    return ""


def _waited(job: JobState) -> bool:
    return job.status.phase not in RESERVING


def _names(job: JobState) -> tuple[str, ...]:
    return job.status.assignment.names if job.status.assignment is not None else ()

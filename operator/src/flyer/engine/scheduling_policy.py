"""The scheduling policy: the order of the queue, which jobs may be preempted when, and their cost.

A second policy replaces the functions of this module: the queue is sorted by `queue_position`, and
the cheapest victims by `preemption_cost_node_ms` are chosen among those that `preemptible_at`
allows. `victim_search` only compares these costs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.api.waiting import PODS_REFUSED
from flyer.engine.state.jobs import ACTIVE
from flyer.engine.state.queue import QueuePosition

if TYPE_CHECKING:
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState

# When the minimum run time and the time slice of a job end.
Protection = tuple[float, float]
# Larger than any sum of other costs: 10,000 nodes for a century cost less.
_OVER_BUDGET_NODE_MS = 10**18


def queue_position(cycle: CycleState, job: JobState) -> QueuePosition:
    """Sort key in the queue: priority, then submit time or, if later, the end of the time slice.

    A job that was interrupted keeps its position, unless it has used its time slice. The queue is
    kept between steps: the key depends on the job and on `Basis`, not on the time.
    """
    history = job.status.history
    submitted_at = history.submitted_at if history.submitted_at is not None else cycle.now
    turn_at = history.turn_at if history.turn_at is not None else submitted_at
    return QueuePosition(-cycle.level(job), turn_at, submitted_at, job.key)


def is_crash_looping(cycle: CycleState, job: JobState) -> bool:
    """Whether the job's attempts fail one after the other: it preempts no job of its priority."""
    history = job.status.history
    failures = history.restarts_without_progress + history.unblamed_restarts
    return failures >= cycle.settings.crash_loop_restarts or history.refusals > 0


def in_refusal_cooldown(cycle: CycleState, job: JobState) -> bool:
    """Whether the job's pods were refused recently: it preempts no job until the cooldown ends."""
    eviction = job.status.eviction
    if eviction is None or eviction.reason != PODS_REFUSED:
        return False
    history, settings = job.status.history, cycle.settings
    cooldown_seconds = min(
        settings.refusal_cooldown_seconds * 2.0 ** min(max(history.refusals - 1, 0), 30),
        settings.refusal_cooldown_seconds_max,
    )
    if history.not_before is not None:
        pause_seconds = history.not_before - eviction.time
        share = pause_seconds / max(settings.refused_backoff_seconds, 0.001)
        cooldown_seconds *= min(share, 1.0)
    refused_at = eviction.time if history.not_before is None else history.not_before
    cycle.wake(refused_at + cooldown_seconds)
    return refused_at + cooldown_seconds > cycle.now


def protection(cycle: CycleState, victim: JobState) -> Protection:
    """When the victim's minimum run time and its time slice end, whichever job waits."""
    assignment = victim.status.assignment
    assert assignment is not None, f"{victim.key}: a victim without nodes"
    if victim.status.phase not in ACTIVE:
        return cycle.now, math.inf
    protected_until = cycle.now
    if assignment.running_at is not None:
        protected_until = quantize(assignment.running_at + cycle.terms(victim).min_runtime)
    return protected_until, _time_slice_ends_at(cycle, victim)


def _time_slice_ends_at(cycle: CycleState, victim: JobState) -> float:
    """When the time slice ends. A job without a checkpoint would lose most, so it gets several."""
    settings, status = cycle.settings, victim.status
    assert status.assignment is not None, f"{victim.key}: active without nodes"
    running_at = status.assignment.running_at
    if settings.time_slice_seconds <= 0 or running_at is None:
        return math.inf
    saved = status.checkpoint is not None and status.checkpoint.time >= running_at
    slices = 1 if saved else settings.unsaved_slices
    remaining = slices * settings.time_slice_seconds - status.history.slice_used
    return quantize(running_at + max(0.0, remaining))


def preemptible_at(
    cycle: CycleState, job: JobState, victim: JobState, victim_protection: Protection
) -> float:
    """From when on the waiting job may preempt the victim, which has nodes; infinite: never.

    A job of a lower priority may be preempted after its minimum run time, or at once before it
    runs. A job of the same priority may be preempted when its time slice is over, or after its
    minimum run time if it was started by backfill.
    """
    protected_until, time_slice_ends_at = victim_protection
    above = cycle.level(job) - cycle.level(victim)
    if above > 0:
        return protected_until
    if above < 0 or is_crash_looping(cycle, job):
        return math.inf
    if _backfilled_ahead_of(cycle, job, victim):
        return protected_until
    if victim.status.phase not in ACTIVE:
        return math.inf
    return max(protected_until, time_slice_ends_at)


def is_time_slice_over(cycle: CycleState, job: JobState, victim: JobState) -> bool:
    """Whether the victim is preempted by a job of its priority because its time slice is over."""
    same_priority = cycle.level(job) == cycle.level(victim)
    return same_priority and not _backfilled_ahead_of(cycle, job, victim)


def _backfilled_ahead_of(cycle: CycleState, job: JobState, victim: JobState) -> bool:
    """Whether the victim was started by backfill although the job is ahead of it in the queue."""
    assignment = victim.status.assignment
    backfill = assignment is not None and assignment.backfill
    return backfill and queue_position(cycle, job) < queue_position(cycle, victim)


def lost_node_ms(cycle: CycleState, victim: JobState) -> int:
    """Work lost by preempting: nodes times the time since the last checkpoint plus a restart."""
    assignment, checkpoint = victim.status.assignment, victim.status.checkpoint
    assert assignment is not None, f"{victim.key}: a victim without nodes"
    if victim.status.phase not in ACTIVE:
        return 0  # no pod of it has started
    running_at = assignment.running_at if assignment.running_at is not None else cycle.now
    saved_at = max(running_at, checkpoint.time) if checkpoint else running_at
    unsaved = max(0.0, cycle.now - saved_at)
    if unsaved > cycle.settings.unsaved_intervals * cycle.terms(victim).interval:
        unsaved = 0.0  # it writes no checkpoints: its work is not protected
    started_at = assignment.started_at if assignment.started_at is not None else running_at
    restart = cycle.settings.restart_cost_seconds + max(0.0, running_at - started_at)
    return len(assignment.nodes) * round((unsaved + restart) * 1000)


def preemption_cost_node_ms(cycle: CycleState, victim: JobState) -> int:
    """Cost of preempting: the work that is lost, and a charge for each displaced node.

    A job that has used its preemption budget costs more than all other jobs together.
    """
    assignment = victim.status.assignment
    assert assignment is not None, f"{victim.key}: a victim without nodes"
    displaced = round(cycle.settings.displaced_seconds * 1000)
    cost = lost_node_ms(cycle, victim) + len(assignment.nodes) * displaced
    if victim.status.phase in ACTIVE and _has_used_preemption_budget(cycle, victim):
        cost += _OVER_BUDGET_NODE_MS
    return cost


def _has_used_preemption_budget(cycle: CycleState, victim: JobState) -> bool:
    since = cycle.now - cycle.settings.preemptions_seconds
    preempted = sum(at > since for at in victim.status.history.preempted_at)
    return preempted >= cycle.settings.preemptions_max


def victim_order(cycle: CycleState, victim: JobState) -> tuple[int, float, str]:
    """Sort key of victims of equal cost: the lower priority, then the one that started last."""
    assignment = victim.status.assignment
    started_at = 0.0
    if assignment is not None:
        started_at = assignment.running_at or assignment.reserved_at
    return cycle.level(victim), -started_at, victim.key


__all__ = [
    "Protection",
    "in_refusal_cooldown",
    "is_crash_looping",
    "is_time_slice_over",
    "lost_node_ms",
    "preemptible_at",
    "preemption_cost_node_ms",
    "protection",
    "queue_position",
    "victim_order",
]

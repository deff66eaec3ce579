"""The three functions that drivers call."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine.actions import Commit, WakeAt
from flyer.engine.conditions import with_conditions
from flyer.engine.draft import RESERVING, CycleState
from flyer.engine.effects import effects
from flyer.engine.errors import JobFault
from flyer.engine.events import NodeEmptied
from flyer.engine.explain import explain
from flyer.engine.nodes import Zones
from flyer.engine.quotas import held_by, quota_snapshot, usage
from flyer.engine.reactions import react
from flyer.engine.reconcile import reconcile
from flyer.engine.removals import apply_removal_budget
from flyer.engine.schedule import schedule_and_start
from flyer.engine.settings import SchedulerSettings
from flyer.engine.state import EngineState, NodeState
from flyer.engine.transitions import new_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flyer.api import FlyerJob, FlyerJobStatus
    from flyer.engine.actions import Action
    from flyer.engine.events import Event
    from flyer.engine.nodes import Node
    from flyer.engine.quotas import Holding, Quota


def step(
    state: EngineState, events: Sequence[Event], now: float
) -> tuple[EngineState, tuple[Action, ...]]:
    """Take in what happened and decide.

    `now` is in seconds since the epoch; a clock that goes back is taken as standing still. Events
    that make no sense any more (of an earlier attempt, of an unknown job) change nothing. Raises
    JobFault for a bug that one job brings to light: nothing has happened then.
    """
    cycle = CycleState(state, now)
    try:
        return _step(cycle, state, events)
    except Exception as error:
        if not cycle.current_job:
            raise
        raise JobFault(cycle.current_job, cycle.current_event) from error


def _step(
    cycle: CycleState, state: EngineState, events: Sequence[Event]
) -> tuple[EngineState, tuple[Action, ...]]:
    committed: dict[str, FlyerJobStatus] = {}  # in this step
    # An exit explains why a node is empty, in whichever order the two were seen.
    for event in sorted(events, key=lambda event: isinstance(event, NodeEmptied)):
        subject = getattr(event, "job", "")
        cycle.current_job = subject if isinstance(subject, str) else subject.key
        cycle.current_event = event
        react(event, cycle)
    cycle.current_job, cycle.current_event = "", None
    cycle.apply_removal_budget()
    reconcile(cycle)
    # Nodes are given back in the store before they are given out again.
    actions: list[Action] = list(_commits(cycle, committed, shrinking_only=True))
    if cycle.is_schedule_due(state):
        cycle.changed = False
        schedule_and_start(cycle)
        cycle.mark_scheduled()
    else:
        cycle.wake(cycle.schedule_due_at)
    actions += _commits(cycle, committed, shrinking_only=False)
    actions += effects(cycle)
    if cycle.changed:  # nodes were given out, or are to be left: others see that in the next step
        cycle.schedule_due_at = -math.inf
    _forget(cycle)
    if cycle.wake_at is not None:
        actions.append(WakeAt(cycle.wake_at))
    return cycle.freeze(), tuple(actions)


def _forget(cycle: CycleState) -> None:
    """Drop jobs that are over and removed, and nodes that are removed and have no job on them."""
    over = [
        key
        for key, job in cycle.active_jobs().items()
        if job.removed and job.sent.finish and not job.status.occupied
    ]
    for key in over:
        del cycle.jobs[key]
    if any(state.removed for state in cycle.nodes.values()):
        used = {*cycle.reserved_by(), *cycle.occupied_by()}
        for name in [one for one, state in cycle.nodes.items() if state.removed]:
            if name not in used:
                del cycle.nodes[name]


def rebuild(
    nodes: Iterable[Node],
    jobs: Iterable[FlyerJob],
    now: float,
    epoch: int,
    settings: SchedulerSettings = SchedulerSettings(),  # noqa: B008 - frozen
    quotas: Iterable[Quota] = (),
    zones: Zones = Zones(),  # noqa: B008 - frozen
    quarantined: Iterable[FlyerJob] = (),
    teams: Mapping[str, str] = MappingProxyType({}),
) -> EngineState:
    """The state that the jobs' statuses describe. `epoch` is the new leader's, above all before.

    `jobs` holds every job that has not ended or still occupies a node. `quarantined` jobs are not
    scheduled: only what they hold counts in quotas (of several statuses of a job, the largest).
    `teams` has the team of each namespace that has one. The first step after it tells again every
    action that is still to be done.
    """
    now = quantize(now)
    known = apply_removal_budget({node.name: NodeState(node) for node in nodes}, zones, now)
    states = [new_job(job, now, rebuilt=True) for job in jobs]
    limits = {quota.name: quota for quota in quotas}
    found = EngineState(
        epoch, settings, now, known, {job.key: job for job in states}, limits, zones,
        teams=dict(teams),
    )  # fmt: skip
    held: dict[str, Holding] = {}
    for job in quarantined:
        holding = held_by(CycleState(found, now), new_job(job, now))
        if holding is not None and (job.key not in held or held[job.key].nodes < holding.nodes):
            held[job.key] = holding
    return replace(found, quarantined=tuple(held.values()))


def quota_holdings(state: EngineState, now: float) -> list[tuple[Quota, list[Holding]]]:
    """Every limit that applies now, and who holds nodes under it."""
    return usage(quota_snapshot(CycleState(state, now)))


def _commits(
    cycle: CycleState, committed: dict[str, FlyerJobStatus], *, shrinking_only: bool
) -> list[Commit]:
    """Commit every changed status: those that keep no new node first."""
    first: list[Commit] = []
    then: list[Commit] = []
    changed = [
        key
        for key, job in cycle.active_jobs().items()
        if job.status is not _before(cycle, committed, key)
        or job.generation != job.status.observed_generation
    ]
    for key in sorted(changed):
        job, before = cycle.jobs[key], _before(cycle, committed, key)
        cycle.current_job = key
        unseen = job.generation != job.status.observed_generation and not job.removed
        if (job.status is before or job.status == before) and not unseen:
            continue
        grows = bool(_kept(job.status) - (_kept(before) if before else frozenset()))
        shrinks = before is not None and bool(_kept(before) - _kept(job.status))
        if shrinking_only and not shrinks:
            continue
        status = with_conditions(job, cycle.now, cycle.zones.limits)
        if before is not None and status == before:
            cycle.put_bookkeeping(replace(job, status=before))
            continue
        status = status.replace(epoch=cycle.epoch)
        cycle.put_bookkeeping(replace(job, status=status))
        committed[key] = status
        (then if grows else first).append(Commit(key, status))
    cycle.current_job = ""
    return first + then


def _before(
    cycle: CycleState, committed: dict[str, FlyerJobStatus], key: str
) -> FlyerJobStatus | None:
    """The status as it was committed last. None for an object that is back.

    While it was gone, nothing that was committed was stored.
    """
    known = cycle.previous_jobs.get(key)
    if known is None or (known.removed and not cycle.jobs[key].removed):
        return committed.get(key)
    return committed.get(key, known.status)


def _kept(status: FlyerJobStatus) -> frozenset[str]:
    if status.phase not in RESERVING or status.assignment is None:
        return frozenset()
    return frozenset(status.assignment.names)


__all__ = ["explain", "quota_holdings", "rebuild", "step"]

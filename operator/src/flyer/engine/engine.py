"""Entry of the engine: `step`, `rebuild`, and the queries of drivers between steps."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine.actions import WakeAt
from flyer.engine.cycle.actions_due import derive_actions
from flyer.engine.cycle.commits import collect_commits
from flyer.engine.cycle.event_handlers import handle_event
from flyer.engine.cycle.reconcile import reconcile
from flyer.engine.cycle.schedule import schedule_and_start
from flyer.engine.cycle.superseded import resubmit_superseded
from flyer.engine.errors import JobFault, UnknownJob
from flyer.engine.events import NodeEmptied
from flyer.engine.explain.explanations import explanation_of
from flyer.engine.quota.snapshot import holding_of, quota_snapshot
from flyer.engine.settings import SchedulerSettings
from flyer.engine.state.cycle_state import CycleState
from flyer.engine.state.engine_state import EngineState
from flyer.engine.state.nodes import NodeState, Zones
from flyer.engine.state.removal_budget import apply_removal_budget
from flyer.engine.state.transitions import new_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flyer.api import FlyerJob, FlyerJobStatus
    from flyer.engine.actions import Action
    from flyer.engine.events import Event
    from flyer.engine.state.explanation import Explanation
    from flyer.engine.state.nodes import Node
    from flyer.engine.state.quotas import Holding, Quota


def step(
    state: EngineState, events: Sequence[Event], now: float
) -> tuple[EngineState, tuple[Action, ...]]:
    """Record the events and decide.

    `now` is in seconds since the epoch; a clock that goes backwards counts as stopped. Outdated
    events (of an earlier attempt, of an unknown job) change nothing. Raises JobFault if an error
    in the engine concerns one job; the state is unchanged then.
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
    # A node is empty because of its pod's exit, in whichever order both were observed.
    for event in sorted(events, key=lambda event: isinstance(event, NodeEmptied)):
        subject = getattr(event, "job", "")
        cycle.current_job = subject if isinstance(subject, str) else subject.key
        cycle.current_event = event
        handle_event(event, cycle)
    cycle.current_job, cycle.current_event = "", None
    cycle.apply_removal_budget()
    if state.active is None:
        resubmit_superseded(cycle)
    reconcile(cycle)
    # Statuses that release nodes are stored before those that reserve them.
    actions: list[Action] = list(collect_commits(cycle, committed, shrinking_only=True))
    if cycle.is_schedule_due(state):
        cycle.changed = False
        schedule_and_start(cycle)
        cycle.mark_scheduled()
    else:
        cycle.wake(cycle.schedule_due_at)
    actions += collect_commits(cycle, committed, shrinking_only=False)
    actions += derive_actions(cycle)
    if cycle.changed:  # jobs got or lost nodes: the next step schedules the others again
        cycle.schedule_due_at = -math.inf
    _drop_finished(cycle)
    if cycle.wake_at is not None:
        actions.append(WakeAt(cycle.wake_at))
    return cycle.freeze(), tuple(actions)


def _drop_finished(cycle: CycleState) -> None:
    """Drop removed jobs that have ended, and removed nodes that no job uses."""
    finished = [
        key
        for key, job in cycle.active_jobs().items()
        if job.removed and job.sent_actions.finish and not job.status.occupied
    ]
    for key in finished:
        del cycle.jobs[key]
    if any(state.removed for state in cycle.nodes.values()):
        used_names = {*cycle.reserved_by(), *cycle.occupied_by()}
        for name in [name for name, state in cycle.nodes.items() if state.removed]:
            if name not in used_names:
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
    """The state that the jobs' statuses describe. `epoch` is above that of all earlier leaders.

    `jobs` holds every job that has not ended or still occupies a node. `quarantined` jobs are not
    scheduled: only what they hold counts in quotas (of several statuses of a job, the largest).
    `teams` maps namespaces to teams. The first step after a rebuild repeats every action that is
    still due.
    """
    now = quantize(now)
    node_states = apply_removal_budget({node.name: NodeState(node) for node in nodes}, zones, now)
    states = [new_job(job, now, rebuilt=True) for job in jobs]
    limits = {quota.name: quota for quota in quotas}
    state = EngineState(
        epoch, settings, now, node_states, {job.key: job for job in states}, limits, zones,
        teams=dict(teams),
    )  # fmt: skip
    holders: dict[str, Holding] = {}
    for job in quarantined:
        holding = holding_of(CycleState(state, now), new_job(job, now))
        if holding is not None and (
            job.key not in holders or holders[job.key].nodes < holding.nodes
        ):
            holders[job.key] = holding
    return replace(state, quarantined=tuple(holders.values()))


def explain(state: EngineState, job: str, now: float) -> Explanation:
    """Every reason why the job has no nodes, and what would give it some. Raises UnknownJob."""
    if job not in state.jobs:
        raise UnknownJob(job, len(state.jobs))
    cycle = CycleState(state, now)
    cycle.explained_job = job
    cycle.apply_removal_budget()
    reconcile(cycle)
    schedule_and_start(cycle)
    return explanation_of(cycle, job)


def quota_holdings(state: EngineState, now: float) -> list[tuple[Quota, list[Holding]]]:
    """Every quota that applies now, and the jobs that hold nodes in it."""
    snapshot = quota_snapshot(CycleState(state, now))
    return [(quota, snapshot.holders(quota)) for quota in snapshot.quotas]


__all__ = ["explain", "quota_holdings", "rebuild", "step"]

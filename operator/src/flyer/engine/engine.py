"""The three functions that drivers call."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from flyer.api import quantize
from flyer.engine.actions import Commit, WakeAt
from flyer.engine.conditions import summarized
from flyer.engine.draft import RESERVING, Draft
from flyer.engine.effects import effects
from flyer.engine.errors import JobFault
from flyer.engine.events import NodeEmptied
from flyer.engine.explain import explain
from flyer.engine.nodes import Zones
from flyer.engine.policy import Policy
from flyer.engine.quotas import held_by, ledger, usage
from flyer.engine.reactions import react
from flyer.engine.removals import judged
from flyer.engine.schedule import schedule_and_launch
from flyer.engine.settle import settle
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
    draft = Draft(state, now)
    try:
        return _step(draft, state, events)
    except Exception as error:
        if not draft.about:
            raise
        raise JobFault(draft.about, draft.event) from error


def _step(
    draft: Draft, state: EngineState, events: Sequence[Event]
) -> tuple[EngineState, tuple[Action, ...]]:
    committed: dict[str, FlyerJobStatus] = {}  # in this step
    # An exit explains why a node is empty, in whichever order the two were seen.
    for event in sorted(events, key=lambda event: isinstance(event, NodeEmptied)):
        subject = getattr(event, "job", "")
        draft.about = subject if isinstance(subject, str) else subject.key
        draft.event = event
        react(event, draft)
    draft.about, draft.event = "", None
    draft.judge_nodes()
    settle(draft)
    # Nodes are given back in the store before they are given out again.
    actions: list[Action] = list(_commits(draft, committed, shrinking_only=True))
    if draft.is_plan_due(state):
        draft.changed = False
        schedule_and_launch(draft)
        draft.planned()
    else:
        draft.wake(draft.plan_due_at)
    actions += _commits(draft, committed, shrinking_only=False)
    actions += effects(draft)
    if draft.changed:  # nodes were given out, or are to be left: others see that in the next step
        draft.plan_due_at = -math.inf
    _forget(draft)
    if draft.wake_at is not None:
        actions.append(WakeAt(draft.wake_at))
    return draft.freeze(), tuple(actions)


def _forget(draft: Draft) -> None:
    """Drop jobs that are over and removed, and nodes that are removed and have no job on them."""
    over = [
        key
        for key, job in draft.active_jobs().items()
        if job.removed and job.sent.finish and not job.status.occupied
    ]
    for key in over:
        del draft.jobs[key]
    if any(state.removed for state in draft.nodes.values()):
        used = {*draft.reserved_by(), *draft.occupied_by()}
        for name in [one for one, state in draft.nodes.items() if state.removed]:
            if name not in used:
                del draft.nodes[name]


def rebuild(
    nodes: Iterable[Node],
    jobs: Iterable[FlyerJob],
    now: float,
    epoch: int,
    policy: Policy = Policy(),  # noqa: B008 - frozen
    quotas: Iterable[Quota] = (),
    zones: Zones = Zones(),  # noqa: B008 - frozen
    apart: Iterable[FlyerJob] = (),
    teams: Mapping[str, str] = MappingProxyType({}),
) -> EngineState:
    """The state that the jobs' statuses describe. `epoch` is the new leader's, above all before.

    `jobs` holds every job that has not ended or still occupies a node, but for those `apart`: of
    them nothing counts but what they hold of quotas, the most of several statuses of one.
    `teams` has the team of each namespace that has one. The first step after it tells again every
    action that is still to be done.
    """
    now = quantize(now)
    known = judged({node.name: NodeState(node) for node in nodes}, zones, now)
    states = [new_job(job, now, rebuilt=True) for job in jobs]
    limits = {quota.name: quota for quota in quotas}
    found = EngineState(
        epoch, policy, now, known, {job.key: job for job in states}, limits, zones,
        teams=dict(teams),
    )  # fmt: skip
    held: dict[str, Holding] = {}
    for job in apart:
        holding = held_by(Draft(found, now), new_job(job, now))
        if holding is not None and (job.key not in held or held[job.key].nodes < holding.nodes):
            held[job.key] = holding
    return replace(found, held_apart=tuple(held.values()))


def quota_usage(state: EngineState, now: float) -> list[tuple[Quota, list[Holding]]]:
    """Every limit that applies now, and who holds nodes under it."""
    return usage(ledger(Draft(state, now)))


def _commits(
    draft: Draft, committed: dict[str, FlyerJobStatus], *, shrinking_only: bool
) -> list[Commit]:
    """Commit every changed status: those that keep no new node first."""
    first: list[Commit] = []
    then: list[Commit] = []
    changed = [
        key
        for key, job in draft.active_jobs().items()
        if job.status is not _before(draft, committed, key)
        or job.generation != job.status.observed_generation
    ]
    for key in sorted(changed):
        job, before = draft.jobs[key], _before(draft, committed, key)
        draft.about = key
        unseen = job.generation != job.status.observed_generation and not job.removed
        if (job.status is before or job.status == before) and not unseen:
            continue
        grows = bool(_kept(job.status) - (_kept(before) if before else frozenset()))
        shrinks = before is not None and bool(_kept(before) - _kept(job.status))
        if shrinking_only and not shrinks:
            continue
        status = summarized(job, draft.now, draft.zones.limits)
        if before is not None and status == before:
            draft.keep(replace(job, status=before))
            continue
        status = status.replace(epoch=draft.epoch)
        draft.keep(replace(job, status=status))
        committed[key] = status
        (then if grows else first).append(Commit(key, status))
    draft.about = ""
    return first + then


def _before(draft: Draft, committed: dict[str, FlyerJobStatus], key: str) -> FlyerJobStatus | None:
    """The status as it was committed last. None for an object that is back.

    While it was gone, nothing that was committed was stored.
    """
    known = draft.before.get(key)
    if known is None or (known.removed and not draft.jobs[key].removed):
        return committed.get(key)
    return committed.get(key, known.status)


def _kept(status: FlyerJobStatus) -> frozenset[str]:
    if status.phase not in RESERVING or status.assignment is None:
        return frozenset()
    return frozenset(status.assignment.names)


__all__ = ["explain", "quota_usage", "rebuild", "step"]

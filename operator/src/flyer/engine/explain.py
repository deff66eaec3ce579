"""`explain`: everything about one job's place, and what a person could do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.api.waiting import PODS_REFUSED, RESTART_BACKOFF
from flyer.engine import blockers as reasons
from flyer.engine.draft import Draft
from flyer.engine.errors import UnknownJob
from flyer.engine.explanation import Blocker, Explanation, Remedy
from flyer.engine.market import Market, options
from flyer.engine.preemption import preemption_plan
from flyer.engine.removals import judged
from flyer.engine.schedule import launch, queue, schedule
from flyer.engine.settle import settle
from flyer.engine.state import HOLDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine.claims import Claim
    from flyer.engine.state import EngineState, JobState


def explain(state: EngineState, job: str, now: float) -> Explanation:
    """Every reason why the job has no nodes, and the cheapest ways out. Raises UnknownJob."""
    if job not in state.jobs:
        raise UnknownJob(job, len(state.jobs))
    draft = Draft(state, now)
    position = _position(draft, job)
    draft.nodes = judged(draft.nodes, draft.zones, draft.now)
    settle(draft)
    claims = schedule(draft)
    launch(draft)
    subject = draft.jobs[job]
    if subject.ended:
        summary = f"{subject.status.phase}: {subject.status.message}"
        return Explanation(job, subject.status.phase, "ended", summary)
    if subject.status.phase is Phase.SUSPENDED:
        return Explanation(
            job, subject.status.phase, "suspended", "suspended: it waits for nobody but its owner",
            remedies=(Remedy(f"flyer resume {job}", "puts it back at its place in the queue"),),
        )  # fmt: skip
    if subject.status.phase in HOLDING:
        return _holding(draft, subject)
    return _waiting(draft, subject, position, claims)


def _position(draft: Draft, key: str) -> int | None:
    order = queue(draft)
    return order.index(key) + 1 if key in order else None


def _holding(draft: Draft, job: JobState) -> Explanation:
    pending, phase = job.status.pending, job.status.phase
    if pending is None:
        text = f"has its {job.spec.nodes} nodes ({phase.value.lower()})"
        return Explanation(job.key, phase, "can", text)
    found = []
    for key in pending.blocked_by:
        other = draft.jobs[key]
        suspension = other.status.suspension
        found.append(
            Blocker(
                pending.reason,
                f"{key} of {other.user} is leaving (suspend code {int(other.status.suspend_code)})",
                job=key,
                user=other.user,
                since=suspension.since if suspension else None,
                until=suspension.deadline if suspension else None,
            )
        )
    return Explanation(
        job.key, phase, "can", f"has its nodes reserved and {pending.message}",
        blockers=tuple(found), eta=pending.eta,
    )  # fmt: skip


def _waiting(
    draft: Draft, job: JobState, position: int | None, claims: Sequence[Claim]
) -> Explanation:
    pending, eviction = job.status.pending, job.status.eviction
    preempted = eviction is not None and eviction.reason == "Preempted"
    by = eviction.by if eviction is not None and preempted else ""
    at = eviction.time if eviction is not None and preempted else None
    never = reasons.never(draft, job)
    if never is None and pending is not None and pending.verdict == "Never":
        never = pending  # by quota
    if never is not None:
        return Explanation(
            job.key, job.status.phase, "never", f"can never run here: {never.message}", position,
            blockers=(Blocker(never.reason, never.message),), preempted_by=by, preempted_at=at,
        )  # fmt: skip
    market = Market(draft)
    place = draft.place(job)
    ahead = [one for one in claims if draft.place(draft.jobs[one.job]) < place]
    found = reasons.blockers(market, job, ahead)
    if job.key in draft.quota_blockers:
        # The quota decides: that nodes are free or not is second.
        found = draft.quota_blockers[job.key] + [one for one in found if one.node]
    if pending is not None and pending.reason in (PODS_REFUSED, RESTART_BACKOFF):
        found.insert(0, Blocker(pending.reason, pending.message, until=pending.eta))
    return Explanation(
        job.key, job.status.phase, "cannot", f"cannot start now: {found[0].message}", position,
        tuple(found), by, at, pending.eta if pending else None,
        _quota_remedies(draft, job) or _remedies(market, job),
    )  # fmt: skip


def _quota_remedies(draft: Draft, job: JobState) -> tuple[Remedy, ...]:
    """A larger quota, or one of the user's own jobs less."""
    found = draft.quota_blockers.get(job.key, [])
    jobs = [draft.jobs[one.job] for one in found[1:] if one.job in draft.jobs]
    running = [one.key for one in jobs if one.holding]
    return tuple(
        Remedy(f"flyer suspend {key}", f"gives its nodes' quota back to {job.user}")
        for key in dict.fromkeys(running)
    )


def _remedies(market: Market, job: JobState) -> tuple[Remedy, ...]:
    """What a person could do, the cheapest first."""
    found: list[Remedy] = []
    for nodes in market.classes(job):
        zones = {node.zone for node in nodes}
        for kind in options(market.draft, job, zones, same_split=False):
            plan = preemption_plan(market, job, nodes, kind, (), anyone=True)
            if plan is None or not plan[1]:
                continue
            victims = plan[1]
            cost = sum(market.lost_node_ms(market.draft.jobs[key]) for key in victims) / 1000
            text = "; ".join(f"flyer suspend {key}" for key in victims)
            found.append(Remedy(text, "frees the nodes once it has saved", cost))
    outs = [
        Remedy("", f"brings back {node.name}", node=node.name)
        for group in market.classes(job)
        for node in group
        if not market.draft.nodes[node.name].eligible
    ]
    unique = {one.command: one for one in found}
    ordered = sorted(unique.values(), key=lambda one: (one.cost_node_seconds or 0.0, one.command))
    return (*ordered, *outs)


__all__ = ["explain"]

"""`explain`: everything about one job's place, and what a person could do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine.draft import CycleState
from flyer.engine.errors import UnknownJob
from flyer.engine.explanation import Blocker, Explanation, Remedy, waiting_summary
from flyer.engine.reconcile import reconcile
from flyer.engine.schedule import schedule_and_start
from flyer.engine.state import HOLDING

if TYPE_CHECKING:
    from flyer.engine.state import EngineState, JobState


def explain(state: EngineState, job: str, now: float) -> Explanation:
    """Every reason why the job has no nodes, and the cheapest ways out. Raises UnknownJob."""
    if job not in state.jobs:
        raise UnknownJob(job, len(state.jobs))
    cycle = CycleState(state, now)
    cycle.explained_job = job
    cycle.apply_removal_budget()
    reconcile(cycle)
    schedule_and_start(cycle)
    subject = cycle.jobs[job]
    if subject.ended:
        summary = f"{subject.status.phase}: {subject.status.message}"
        return Explanation(job, subject.status.phase, "ended", summary)
    if subject.status.phase is Phase.SUSPENDED:
        return Explanation(
            job, subject.status.phase, "suspended", "suspended: it waits for nobody but its owner",
            remedies=(Remedy(f"flyer resume {job}", "puts it back at its place in the queue"),),
        )  # fmt: skip
    if subject.status.phase in HOLDING:
        return _holding(subject)
    return _waiting(cycle, subject)


def _holding(job: JobState) -> Explanation:
    pending, phase = job.status.pending, job.status.phase
    if pending is None:
        text = f"has its {job.spec.nodes} nodes ({phase.value.lower()})"
        return Explanation(job.key, phase, "can", text)
    found = [
        Blocker(
            reason.reason,
            reason.message,
            reason.job,
            reason.user,
            reason.node,
            reason.since,
            reason.until,
        )
        for reason in pending.reasons
    ]
    return Explanation(
        job.key, phase, "can", f"has its nodes reserved and {pending.message}",
        blockers=tuple(found), eta=pending.eta,
    )  # fmt: skip


def _waiting(cycle: CycleState, job: JobState) -> Explanation:
    detail, eviction = cycle.explained_detail, job.status.eviction
    assert detail is not None, f"{job.key}: waits, and was not looked at"
    preempted = eviction is not None and eviction.reason == "Preempted"
    pending = detail.pending
    never = pending.verdict == "Never"
    return Explanation(
        job.key,
        job.status.phase,
        "never" if never else "cannot",
        waiting_summary(pending, detail.blockers[0].message),
        detail.position,
        detail.blockers,
        eviction.by if eviction is not None and preempted else "",
        eviction.time if eviction is not None and preempted else None,
        pending.eta,
        detail.remedies,
    )


__all__ = ["explain"]

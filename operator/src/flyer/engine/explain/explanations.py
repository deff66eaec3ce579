"""Explanations for users: what a job waits for, according to the last scheduling cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine.state.explanation import Blocker, Explanation, Remedy, waiting_summary
from flyer.engine.state.jobs import HOLDING

if TYPE_CHECKING:
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState


def explanation_of(cycle: CycleState, key: str) -> Explanation:
    """Explanation of the job's position, after a cycle with this job as `explained_job`."""
    job = cycle.jobs[key]
    if job.ended:
        summary = f"{job.status.phase}: {job.status.message}"
        return Explanation(key, job.status.phase, "ended", summary)
    if job.status.phase is Phase.SUSPENDED:
        return Explanation(
            key, job.status.phase, "suspended", "suspended until its owner resumes it",
            remedies=(Remedy(f"flyer resume {key}", "puts it back at its place in the queue"),),
        )  # fmt: skip
    if job.status.phase in HOLDING:
        return _holding(job)
    return _waiting(cycle, job)


def _holding(job: JobState) -> Explanation:
    pending, phase = job.status.pending, job.status.phase
    if pending is None:
        text = f"has its {job.spec.nodes} nodes ({phase.value.lower()})"
        return Explanation(job.key, phase, "can", text)
    return Explanation(
        job.key, phase, "can", f"has its nodes reserved and {pending.message}",
        blockers=tuple(Blocker(**dict(reason)) for reason in pending.reasons), eta=pending.eta,
    )  # fmt: skip


def _waiting(cycle: CycleState, job: JobState) -> Explanation:
    detail, eviction = cycle.explained_detail, job.status.eviction
    assert detail is not None, f"{job.key}: waits, and the cycle has not looked at it"
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


__all__ = ["explanation_of"]

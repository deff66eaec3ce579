"""Presenter: builds the views that clients receive from FlyerJob objects. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import FlyerJob, FlyerJobStatus, Phase, format_timestamp
from flyer.engine import quota_holdings
from flyer.engine.state.explanation import waiting_summary
from flyer.engine.state.quotas import ANY
from flyer.errors import ExitStatus
from flyer.views import (
    CheckpointView,
    FailureView,
    JobView,
    PlacedNode,
    ProgressView,
    QueueView,
    QuotaView,
    WhyReason,
    WhyView,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from flyer.api import Pending, PendingReason
    from flyer.attempt_history import JobHistory
    from flyer.engine import Blocker, EngineState, Explanation

__all__ = [
    "job_exit_status",
    "job_view",
    "queue_views",
    "quota_views",
    "why_of",
    "why_view",
]

NOT_STARTED = (Phase.QUEUED, Phase.RESERVED, Phase.DRAINING)
FAILED_BY_RANKS = ("RankFailed", "MaxRestartsExceeded")
STOPPED_REASONS = ("Stopped", "Removed")


def job_view(
    job: FlyerJob,
    history: JobHistory,
    progress: ProgressView | None,
    logs: Path,
    *,
    driven: bool = True,
) -> JobView:
    """One job. Without a driver an unfinished job is shown as waiting for one."""
    status = job.status or FlyerJobStatus()
    ended = status.phase.ended
    undriven = not driven and not ended
    assignment = None if undriven else status.assignment
    state, reason, message = str(status.phase), status.reason, status.message
    if status.pending is not None and status.phase in NOT_STARTED:
        reason, message = status.pending.reason, status.pending.message
    if undriven and status.phase is not Phase.SUSPENDED:
        state, reason, message = (
            "Queued",
            "NoDriver",
            "no driver is running; `flyer run` resumes the job",
        )
    if job.others and job.status is None:
        message = f"{job.others} runs this job (spec.managedBy) and has not reported a status yet"
    finished = status.condition("Complete" if status.phase is Phase.SUCCEEDED else "Failed")
    # A stopped job did not fail because of a rank of an earlier attempt.
    by_rank = status.phase is Phase.FAILED and status.reason in FAILED_BY_RANKS
    failure = history.failure if by_rank else None
    return JobView(
        name=job.metadata.name,
        namespace=job.metadata.namespace,
        state=state,
        reason=reason,
        message=message,
        nodes=job.spec.nodes,
        ranks_per_node=job.spec.ranks_per_node,
        priority=str(job.spec.priority),
        queue=job.queue,
        node_class=job.spec.node_class or "",
        zone=job.spec.zone or "",
        created_at=job.metadata.creation_timestamp or 0.0,
        history_id=status.history.id,
        attempt=status.history.attempt,
        restarts=status.history.restarts,
        suspend_code=int(status.suspend_code),
        suspended=job.spec.suspend,
        zones=list(assignment.zones) if assignment and not ended else [],
        placement=_placement(assignment.nodes) if assignment and not ended else [],
        cross_zone_pair=list(assignment.cross_zone_pair) if assignment and not ended else [],
        progress=progress or _progress(status),
        checkpoint=_checkpoint(status),
        eta=format_timestamp(status.pending.eta) if status.pending and status.pending.eta else "",
        finished_at=finished.last_transition_time if ended and finished else None,
        exit_status=job_exit_status(status, failure) if ended else None,
        failure=failure,
        attempts=list(history.attempts),
        conditions=[condition.to_object() for condition in status.conditions],
        log_folder=str(logs),
    )


def _placement(nodes: Iterable[object]) -> list[PlacedNode]:
    return [
        PlacedNode(node.name, node.zone, node.first_rank)  # type: ignore[attr-defined]
        for node in nodes
    ]


def _progress(status: FlyerJobStatus) -> ProgressView | None:
    if status.progress is None:
        return None
    progress = status.progress
    return ProgressView(progress.step, progress.time, exposed_percent=progress.exposed_percent)


def _checkpoint(status: FlyerJobStatus) -> CheckpointView | None:
    checkpoint = status.checkpoint
    return (
        CheckpointView(checkpoint.step, checkpoint.time, checkpoint.path, checkpoint.durable)
        if checkpoint
        else None
    )


def job_exit_status(status: FlyerJobStatus, failure: FailureView | None) -> int:
    """The exit status of `flyer run` for an ended job."""
    if status.phase is Phase.SUCCEEDED:
        return 0
    if status.reason in STOPPED_REASONS:
        return ExitStatus.CANCELLED
    if failure is not None and failure.signal is not None:
        return 128 + failure.signal
    codes = [exit_.exit_status for exit_ in status.exits if exit_.outcome == "Failed"]
    code = failure.exit_status if failure is not None else next(iter(codes), None)
    if code is not None and (1 <= code <= 99 or 128 < code <= 192):
        return code
    return 100


def queue_views(jobs: Mapping[str, FlyerJob]) -> list[QueueView]:
    """Every queue that has an unfinished job."""
    queues: dict[str, list[FlyerJob]] = {}
    for job in jobs.values():
        phase = job.status.phase if job.status else Phase.QUEUED
        if not phase.ended:
            queues.setdefault(job.queue, []).append(job)
    views = []
    for name, members in sorted(queues.items()):
        running = [job for job in members if job.status and job.status.phase.has_pods]
        waiting = [job for job in members if not job.status or job.status.phase in NOT_STARTED]
        views.append(
            QueueView(
                name,
                len(running),
                len(waiting),
                sum(job.spec.nodes for job in running),
                sum(job.spec.nodes for job in waiting),
                [job.key for job in [*running, *waiting]],
            )
        )
    return views


def quota_views(state: EngineState, now: float) -> list[QuotaView]:
    """Every quota that applies, with the usage per subject."""
    views = []
    for quota, holdings in quota_holdings(state, now):
        kind, total = quota.kind, quota.total
        names = {ANY if total else holding.subjects.of(kind) for holding in holdings} or {
            quota.subject
        }
        for name in sorted(names):
            own = [item for item in holdings if total or item.subjects.of(kind) == name]
            views.append(
                QuotaView(
                    quota.name, kind.value, name, "Total" if total else "Each",
                    quota.priority, quota.node_class,
                    sum(element.nodes for element in own), quota.nodes, quota.expires_at,
                    [entry.job for entry in own],
                )
            )  # fmt: skip
    return views


def why_view(explanation: Explanation, returns: Mapping[str, str]) -> WhyView:
    """Every reason and every remedy. `returns` maps lost nodes to the remedy that restores them.

    A remedy is a command or something to wait for, followed by # and its effect.
    """
    unblock = [
        f"{remedy.command}  # {remedy.effect}" for remedy in explanation.remedies if remedy.command
    ]
    node_names = {item.node for item in explanation.remedies if item.node}
    unblock += [line for name, line in returns.items() if name in node_names]
    return WhyView(
        job=explanation.job,
        phase=explanation.phase,
        verdict=explanation.verdict,
        summary=explanation.summary,
        position=explanation.position,
        reasons=[_reason(blocker) for blocker in explanation.blockers],
        preempted_by=explanation.preempted_by,
        preempted_at=explanation.preempted_at,
        unblock=unblock,
        eta=explanation.eta,
    )


def why_of(job: FlyerJob) -> WhyView:
    """The leading scheduler's explanation, from the job's status."""
    status = job.status or FlyerJobStatus()
    pending, eviction = status.pending, status.eviction
    preempted = eviction if eviction is not None and eviction.reason == "Preempted" else None
    waits = status.phase is Phase.QUEUED
    return WhyView(
        job=job.key,
        phase=str(status.phase),
        verdict=_verdict(status),
        summary=_why_summary(job, status),
        position=pending.position if pending is not None else None,
        reasons=_status_reasons(pending),
        preempted_by=preempted.by if preempted is not None and waits else "",
        preempted_at=preempted.time if preempted is not None and waits else None,
        unblock=[f"{remedy.command}  # {remedy.effect}" for remedy in pending.unblock]
        if pending
        else [],
        eta=pending.eta if pending is not None else None,
        more=pending.more if pending is not None else 0,
        decided_at=pending.time if pending is not None else None,
    )


def _verdict(status: FlyerJobStatus) -> str:
    if status.phase.ended:
        return "ended"
    if status.phase is Phase.SUSPENDED:
        return "suspended"
    if status.phase is not Phase.QUEUED:
        return "can"
    return "never" if status.pending and status.pending.verdict == "Never" else "cannot"


def _why_summary(job: FlyerJob, status: FlyerJobStatus) -> str:
    phase, pending = status.phase, status.pending
    quarantine = status.condition("Quarantined")
    if quarantine is not None:
        return f"{phase}: {quarantine.message}"
    if phase is Phase.SUSPENDED:
        return "suspended: it waits for `flyer resume`"
    if phase is Phase.QUEUED and pending is not None:
        reasons = pending.reasons
        return waiting_summary(pending, reasons[0].message if reasons else pending.message)
    if phase in (Phase.RESERVED, Phase.DRAINING) and pending is not None:
        return f"has its nodes reserved and {pending.message}"
    if phase.has_pods:
        return f"has its {job.spec.nodes} nodes ({phase.value.lower()})"
    return f"{phase}" + (f": {status.message}" if status.message else "")


def _status_reasons(pending: Pending | None) -> list[WhyReason]:
    if pending is None:
        return []
    if not pending.reasons:
        return [WhyReason(pending.reason, pending.message, "", "", "", None, pending.eta)]
    return [_reason(reason) for reason in pending.reasons]


def _reason(blocker: Blocker | PendingReason) -> WhyReason:
    return WhyReason(
        reason=blocker.reason,
        message=blocker.message,
        job=blocker.job,
        owner=blocker.user,
        node=blocker.node,
        since=blocker.since,
        until=blocker.until,
    )

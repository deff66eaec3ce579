"""Views of jobs, nodes and events from the objects of a cluster. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flyer.api import FlyerJob, FlyerJobStatus, Phase, parse_timestamp
from flyer.attempt_history import JobHistory
from flyer.presenter import job_view
from flyer.views import AttemptView, EventView, FailureView, NodeView, PlacedNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flyer.engine import Node
    from flyer.views import JobView

__all__ = ["event_view", "job_of", "node_views", "view_of"]


def job_of(value: Mapping[str, Any]) -> FlyerJob | None:
    """The object as a model; None when a newer version of the API wrote it."""
    metadata = {name: entry for name, entry in value["metadata"].items() if name != "managedFields"}
    try:
        return FlyerJob.model_validate({**value, "metadata": metadata})
    except ValidationError:
        return None


def view_of(job: FlyerJob) -> JobView:
    """One job. Attempts that its status no longer lists are only in its events."""
    status = job.status or FlyerJobStatus()
    history = JobHistory(_attempts(status), _failure(status))
    return replace(job_view(job, history, None, Path()), log_folder="")


def _attempts(status: FlyerJobStatus) -> list[AttemptView]:
    views = [
        AttemptView(
            past.attempt, past.started_at, past.ended_at,
            [PlacedNode(node.name, node.zone, 0) for node in past.nodes],
            past.restored_step, past.same_zone_layout, past.reason, past.lost_steps,
        )
        for past in status.past_attempts
    ]  # fmt: skip
    assignment = status.assignment
    if assignment is not None:
        ended = status.phase.ended
        closed = status.condition("Complete" if status.phase is Phase.SUCCEEDED else "Failed")
        views.append(
            AttemptView(
                status.history.attempt,
                assignment.started_at or assignment.reserved_at,
                closed.last_transition_time if ended and closed else None,
                [PlacedNode(item.name, item.zone, item.first_rank) for item in assignment.nodes],
                assignment.restored_step,
                assignment.same_zone_layout,
                status.reason if ended else "",
            )
        )
    return views


def _failure(status: FlyerJobStatus) -> FailureView | None:
    failed = [exit_ for exit_ in status.exits if exit_.outcome == "Failed"]
    if not failed:
        return None
    first = min(failed, key=lambda failure: failure.time)
    words = first.traceback or first.reason
    return FailureView(first.rank, first.node, first.exit_status, first.signal, words)


def node_views(nodes: Iterable[Node], jobs: Iterable[FlyerJob]) -> list[NodeView]:
    """Every node with the job that holds it or still occupies it."""
    holders: dict[str, tuple[FlyerJob, int, int | None]] = {}
    for job in jobs:
        status = job.status or FlyerJobStatus()
        for occupied_node in status.occupied:
            holders.setdefault(occupied_node.name, (job, occupied_node.attempt, None))
        if status.assignment is not None and not status.phase.ended:
            for item in status.assignment.nodes:
                holders[item.name] = (job, status.history.attempt, item.first_rank)
    return [_node_view(node, holders.get(node.name)) for node in nodes]


def _node_view(node: Node, holder: tuple[FlyerJob, int, int | None] | None) -> NodeView:
    job, attempt, first = holder if holder is not None else (None, None, None)
    phase = job.status.phase if job is not None and job.status is not None else None
    state = "Ready" if node.ready else "Lost"
    if holder is not None and node.ready:
        state = "Reserved" if phase in (Phase.RESERVED, Phase.DRAINING) else "Busy"
    last = first + job.spec.ranks_per_node - 1 if job is not None and first is not None else None
    return NodeView(
        name=node.name,
        zone=node.zone,
        leaf=node.leaf,
        node_class=node.node_class,
        slots=node.slots,
        state=state,
        reason=node.reason or (str(phase) if phase is not None else ""),
        job=job.key if job is not None else "",
        attempt=attempt,
        first_rank=first,
        last_rank=last,
        supervisor_pid=None,
        pids=[],
        returns_at=None,
    )


def event_view(value: Mapping[str, Any]) -> EventView:
    """A Kubernetes Event about a job. `sequence` is its resource version: it grows."""
    about = value.get("involvedObject") or {}
    metadata = value["metadata"]
    series = value.get("series") or {}
    moment = (
        series.get("lastObservedTime")
        or value.get("lastTimestamp")
        or value.get("eventTime")
        or metadata.get("creationTimestamp")
    )
    version = metadata.get("resourceVersion", "0")
    return EventView(
        sequence=int(version) if version.isdigit() else 0,
        time=parse_timestamp(moment) if moment else 0.0,
        type=value.get("type", "Normal"),
        reason=value.get("reason", ""),
        message=value.get("message", ""),
        job=f"{about.get('namespace', '')}/{about.get('name', '')}",
        fields={"count": int(series.get("count") or value.get("count") or 1)},
    )

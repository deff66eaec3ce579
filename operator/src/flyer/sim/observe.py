"""Initial observations: the events of a driver that starts on a running cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import FlyerJob, FlyerJobStatus, Phase
from flyer.engine import (
    CheckpointReported,
    Event,
    GangStarted,
    JobSubmitted,
    Node,
    NodeEmptied,
    NodeLost,
    PodExited,
    Released,
    SuspendReceived,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.sim.pods import Cluster, Machine, Run

__all__ = ["observe", "observed_node"]


def observe(jobs: Iterable[FlyerJob], cluster: Cluster) -> list[Event]:
    """The events, by the contract that the engine documents."""
    events: list[Event] = []
    for job in jobs:
        status = job.status
        if status is None:
            events.append(JobSubmitted(job))
            continue
        attempt = status.history.attempt
        for occupied_node in status.occupied:
            pod = cluster.pods.get((occupied_node.name, job.key, occupied_node.attempt))
            powered = cluster.machines[occupied_node.name].powered
            if pod is not None and pod.outcome is not None and powered:
                events.append(
                    PodExited(job.key, occupied_node.attempt, occupied_node.name, pod.outcome)
                )
            if pod is None and powered and not _to_start(status, occupied_node.attempt):
                events.append(NodeEmptied(occupied_node.name, job.key, occupied_node.attempt))
        run = cluster.runs.get((job.key, attempt))
        events += _words_of(run) if run is not None and run.alive else []
    for name, machine in cluster.machines.items():
        if not machine.powered:
            events.append(NodeLost(name, "PowerLost", "found dead"))
    return events


def observed_node(machine: Machine) -> Node:
    """The node as reported to the engine."""
    node = machine.node
    if machine.powered:
        return node
    return Node(node.name, node.zone, node.leaf, node.node_class, node.slots, False, "no power")


def _words_of(run: Run) -> list[Event]:
    """Events that a job reports again to a new driver."""
    words: list[Event] = [GangStarted(run.job, run.attempt)] if run.up else []
    if run.saved_step is not None:
        words.append(CheckpointReported(run.job, run.attempt, run.saved_step, run.saved_path))
    words += [SuspendReceived(run.job, run.attempt)] if run.received else []
    words += [Released(run.job, run.attempt)] if run.released else []
    return words


def _to_start(status: FlyerJobStatus, attempt: int) -> bool:
    """Whether the Start of this attempt is repeated, so that no event was missed."""
    return status.phase is Phase.STARTING and attempt == status.history.attempt

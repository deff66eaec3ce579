"""Restart of a driver: rebuilds the state of the engine from the stored jobs.

The engine's state is derived from the jobs alone. No pod has outlived its driver, so the nodes that
were in use are reported as empty.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from flyer import engine
from flyer.api import FlyerJobStatus
from flyer.engine import Killed, NodeEmptied, PodExited, SchedulerSettings
from flyer.engine.decision_log import rebuild_line
from flyer.job_events import DRIVER_RESTARTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.api import FlyerJob
    from flyer.engine import EngineState, Event
    from flyer.local.cluster import LocalCluster
    from flyer.local.event_log import EventLog
    from flyer.local.store import Store

__all__ = ["rebuilt", "vanished_pods"]


def rebuilt(
    cluster: LocalCluster, store: Store, stored_jobs: Mapping[str, FlyerJob]
) -> EngineState:
    """The engine's state in a new term, which is the first entry of the decision log."""
    epochs = [job.status.epoch for job in stored_jobs.values() if job.status]
    # Written by an earlier version, which stored it only in the assignment.
    epochs += [
        job.status.assignment.epoch
        for job in stored_jobs.values()
        if job.status and job.status.assignment
    ]
    own = cluster.settings.model_dump(exclude={"stop_pause_seconds"})
    scheduler_settings = SchedulerSettings(**own)
    nodes, jobs = cluster.engine_nodes(), list(stored_jobs.values())
    now, epoch = time.time(), max(epochs, default=0) + 1
    quotas = cluster.engine_quotas()
    line = rebuild_line(nodes, jobs, now, epoch, scheduler_settings, quotas)
    store.note(store.decisions, line)
    return engine.rebuild(nodes, jobs, now, epoch, scheduler_settings, quotas)


def vanished_pods(jobs: Mapping[str, FlyerJob], event_log: EventLog) -> list[Event]:
    """The ends of all pods of the previous driver: `kill_orphans` has ensured that none runs."""
    events: list[Event] = []
    for key, job in sorted(jobs.items()):
        status = job.status or FlyerJobStatus()
        if status.occupied:
            event_log.record(
                time.time(),
                DRIVER_RESTARTED,
                f"the previous driver ended with the job {status.phase}; "
                f"process {os.getpid()} resumes it",
                job=key,
                attempt=status.history.attempt,
            )
        for occupied_node in status.occupied:
            outcome = Killed(0, "the driver ended")
            events.append(PodExited(key, occupied_node.attempt, occupied_node.name, outcome))
            events.append(NodeEmptied(occupied_node.name, key, occupied_node.attempt))
    return events

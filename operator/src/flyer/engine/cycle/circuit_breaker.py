"""Circuit breaker for simultaneous failures of many jobs.

When the start path or the report path of the cluster breaks (the gateway's port is closed, a
registry is down, a switch restarts), every job fails in the same way within minutes. Such failures
say nothing about a single job: while the breaker is open they do not count against `maxRestarts`.
The breaker opens only for jobs of several users, unless there is only one user: the failing jobs of
one user do not open it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine.state.engine_state import Incident, IncidentKind
from flyer.engine.state.jobs import ACTIVE, JobState

if TYPE_CHECKING:
    from flyer.engine.state.cycle_state import CycleState

# A window with more incidents is an outage in any case.
_INCIDENTS_MAX = 4096


def record_incident(cycle: CycleState, kind: IncidentKind, job: JobState) -> None:
    """Record an incident, and drop those that are older than all windows."""
    horizon = cycle.now - max(_window(cycle, "start"), _window(cycle, "run"))
    recent = [incident for incident in cycle.incidents if incident.time >= horizon]
    recent.append(Incident(cycle.now, kind, job.key, job.user))
    cycle.incidents = recent[-_INCIDENTS_MAX:]


def outage(cycle: CycleState, kind: IncidentKind) -> str:
    """Message about a simultaneous failure of many jobs; empty: there is none."""
    since = cycle.now - _window(cycle, kind)
    recent = [incident for incident in cycle.incidents if incident.time >= since]
    hit = {incident.job: incident.user for incident in recent if incident.kind == kind}
    settings = cycle.settings
    if kind == "start":
        well = {incident.job for incident in recent if incident.kind == "up"} - hit.keys()
    else:
        active = cycle.active_jobs()
        well = {key for key, job in active.items() if job.status.phase in ACTIVE} - hit.keys()
    many = len(hit) >= settings.outage_jobs_min and len(hit) > len(well)
    if not many:
        return ""
    users = set(hit.values())
    if len(users) == 1 and any(
        job.user not in users and not job.ended for job in cycle.jobs.values()
    ):
        return ""
    verb = "did not start" if kind == "start" else "were interrupted"
    seconds = cycle.now - since
    return (
        f"{len(hit)} jobs {verb} within {seconds:g} s and {len(well)} did well: the cluster is "
        "blamed, the restart is not counted"
    )


def _window(cycle: CycleState, kind: IncidentKind) -> float:
    settings = cycle.settings
    # Jobs that started at different times exceed the start deadline at different times.
    return settings.outage_seconds + (settings.start_deadline_seconds if kind == "start" else 0.0)


__all__ = ["outage", "record_incident"]

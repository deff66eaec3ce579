"""The engine's state: nodes as observed, and jobs as committed.

Everything that must survive a restart is in a job's `status`, which is exactly what was committed.
`ObservedState` and `SentActions` are what this process observed and sent since it started: without
them actions are repeated and deadlines restart, but no decision is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from flyer.engine.state.nodes import NodeState, Zones

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.api import FlyerJobSpec, Priority
    from flyer.engine.settings import SchedulerSettings
    from flyer.engine.state.explanation import Remedy
    from flyer.engine.state.jobs import JobState
    from flyer.engine.state.preemption_limits import Limits, PreemptionTerms
    from flyer.engine.state.queue import Queue
    from flyer.engine.state.quotas import Holding, Quota


if TYPE_CHECKING:
    TermsOfSpec = tuple[Limits, FlyerJobSpec, PreemptionTerms]
    KnownRemedies = Mapping[tuple[object, ...], tuple[float, tuple[Remedy, ...]]]

# run: a running attempt failed; start: a start failed; up: a start succeeded.
IncidentKind = Literal["run", "start", "up"]


@dataclass(frozen=True, slots=True)
class Incident:
    """One restart or start of a job."""

    time: float
    kind: IncidentKind
    job: str
    user: str


@dataclass(frozen=True, slots=True)
class EngineState:
    """Everything that the engine keeps between steps, as an immutable value."""

    epoch: int
    settings: SchedulerSettings
    now: float
    nodes: Mapping[str, NodeState]
    jobs: Mapping[str, JobState]
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    zones: Zones = field(default_factory=Zones)
    # Nodes held by quarantined jobs, which are not in `jobs`. Quotas count them.
    quarantined: tuple[Holding, ...] = ()
    # Team of each namespace that has one, for quotas of teams.
    teams: Mapping[str, str] = field(default_factory=dict)
    # Recent restarts and starts, for the circuit breaker.
    incidents: tuple[Incident, ...] = ()
    # Token bucket for writes of `status.pending`: tokens, and their time; None: full.
    pending_writes: tuple[float, float] | None = None
    # Time of the last scheduling pass, and when the next one is due without a change.
    scheduled_at: float = -math.inf
    schedule_due_at: float = -math.inf
    # Jobs that a step has to visit without an event: all except those that only wait in the
    # queue. None: all jobs.
    active: tuple[str, ...] | None = None
    # The queue of the last scheduling pass, and the jobs that changed since. None: all changed.
    queue: Queue | None = None
    queue_changes: tuple[str, ...] = ()
    # Remedies that were found recently and when, by the nodes that a job requires.
    remedies: KnownRemedies = field(default_factory=dict)
    # Next due time of jobs that a step can skip, by key.
    skip_until: Mapping[str, float] = field(default_factory=dict)
    # Preemption terms that the last step computed, by the id of the spec and the priority.
    terms: Mapping[tuple[int, Priority], TermsOfSpec] = field(default_factory=dict)


__all__ = ["EngineState", "Incident", "IncidentKind"]

"""The engine's state: nodes as observed, and jobs as committed.

Everything that must survive a restart is in a job's `status`, which is exactly what was committed.
`Seen` and `Sent` are what this process observed and did since it started: losing them costs a
repeated action or a restarted clock, never a decision.
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

# "run": an attempt that ran was lost; "start": one did not come up; "up": one did.
IncidentKind = Literal["run", "start", "up"]


@dataclass(frozen=True, slots=True)
class Incident:
    """One restart, or one start, of a job."""

    time: float
    kind: IncidentKind
    job: str
    user: str


@dataclass(frozen=True, slots=True)
class EngineState:
    """Everything. A value: `step` returns a new one."""

    epoch: int
    settings: SchedulerSettings
    now: float
    nodes: Mapping[str, NodeState]
    jobs: Mapping[str, JobState]
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    zones: Zones = field(default_factory=Zones)
    # What jobs hold that are not among `jobs`: quotas count it.
    quarantined: tuple[Holding, ...] = ()
    # The team of each namespace that has one: quotas of teams count by it.
    teams: Mapping[str, str] = field(default_factory=dict)
    # Restarts and starts of the recent past: whether many jobs fail at once (`incidents`).
    incidents: tuple[Incident, ...] = ()
    # Writes of `status.pending` that are allowed now, and when they were counted; None: a burst.
    pending_writes: tuple[float, float] | None = None
    # When nodes were last given out, and when that has to be looked at again if nothing changes.
    scheduled_at: float = -math.inf
    schedule_due_at: float = -math.inf
    # The jobs for which a step may have something to do, though nothing happens to them: all but a
    # queue that only waits for its turn. None: not known, so all of them.
    active: tuple[str, ...] | None = None
    # The waiting jobs as the last plan found them, and the jobs that changed since. None: all did.
    queue: Queue | None = None
    queue_changes: tuple[str, ...] = ()
    # Ways out that were found lately, by what is wanted, and when they were found.
    remedies: KnownRemedies = field(default_factory=dict)
    # When something has to be done for jobs that neither change nor wait.
    skip_until: Mapping[str, float] = field(default_factory=dict)
    # How jobs may be preempted, as the last step worked it out: by the id of the spec.
    terms: Mapping[tuple[int, Priority], TermsOfSpec] = field(default_factory=dict)


__all__ = ["EngineState", "Incident", "IncidentKind"]

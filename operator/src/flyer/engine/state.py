"""The engine's state: nodes as observed, and jobs as committed.

Everything that must survive a restart is in a job's `status`, which is exactly what was committed.
`Seen` and `Sent` are what this process observed and did since it started: losing them costs a
repeated action or a restarted clock, never a decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.api import FlyerJobSpec, FlyerJobStatus, Phase, Priority
from flyer.engine.nodes import Node, Zones

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.engine.explanation import Remedy
    from flyer.engine.incidents import Incident
    from flyer.engine.limits import Limits, PreemptionTerms
    from flyer.engine.queue import Queue
    from flyer.engine.quotas import Holding, Quota
    from flyer.engine.settings import SchedulerSettings

if TYPE_CHECKING:
    TermsOfSpec = tuple[Limits, FlyerJobSpec, PreemptionTerms]
    KnownRemedies = Mapping[tuple[object, ...], tuple[float, tuple[Remedy, ...]]]

# Phases in which `assignment` reserves nodes.
HOLDING = frozenset(
    {Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING}
)
ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED})


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node and whether its loss was reported."""

    node: Node
    lost: str = ""  # the cause; empty: not lost
    # The Node object was deleted: forgotten as soon as no job has processes or a place there.
    removed: bool = False
    # The latest hardware fault, and when it was last known to be present.
    fault: str = ""
    fault_at: float = 0.0
    # The removal budget took the node out: why, and since when its health is not observed.
    out: str = ""
    unproven_at: float | None = None
    # Jobs whose start failed because of this node, with user and time; a start there clears it.
    start_failures: tuple[tuple[str, str, float], ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether new work may go there."""
        return self.node.ready and not self.lost and not self.out


@dataclass(frozen=True, slots=True)
class Seen:
    """Observed since the engine started; not committed."""

    activity_at: float = 0.0  # progress or a log line
    step: int | None = None
    progress_committed_at: float = 0.0
    # Since when the sidecars of the attempt have no stream; None: they have one.
    stream_lost_at: float | None = None
    # Nodes whose pods the start of the attempt still waits for, as last reported.
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """Told to the driver since the engine started."""

    signal: tuple[int, float] | None = None  # attempt, deadline
    start: int | None = None  # attempt
    token: bool | None = None  # None: not known after a rebuild
    finish: bool = False
    # Per node: attempt, time of the first and of the latest Stop.
    stops: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobState:
    """One job."""

    key: str
    user: str
    generation: int | None
    spec: FlyerJobSpec
    status: FlyerJobStatus
    suspend: bool  # spec.suspend, which changes while the job runs
    queue: str = ""
    suspend_by: str = "user"
    suspend_reason: str = ""
    requeue: int | None = None  # the attempt that is to queue again
    removed: bool = False
    seen: Seen = Seen()
    sent: Sent = Sent()

    @property
    def holding(self) -> bool:
        """Whether the job's assignment reserves nodes."""
        return self.status.phase in HOLDING and self.status.assignment is not None

    @property
    def is_only_queued(self) -> bool:
        """Whether a step has nothing to do for the job but to give it nodes."""
        status, sent = self.status, self.sent
        return (
            status.phase is Phase.QUEUED
            and not (self.suspend or self.removed or status.occupied or sent.stops)
            and sent.token is False
            and self.spec.stop is None
            and self.generation == status.observed_generation
        )

    @property
    def is_skippable(self) -> bool:
        """Whether the time alone decides when something has to be done, if nothing changes."""
        status = self.status
        if self.ended:
            return self.sent.finish and not status.occupied
        heard = self.seen.stream_lost_at is None  # else it depends on the streams of others
        return status.phase is Phase.RUNNING and heard and not (status.exits or self.sent.stops)

    @property
    def ended(self) -> bool:
        """Whether the job is over for good."""
        return self.status.phase in ENDED


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


__all__ = ["ENDED", "HOLDING", "EngineState", "JobState", "NodeState", "Seen", "Sent"]

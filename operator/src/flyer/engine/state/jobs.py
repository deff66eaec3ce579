"""State of one job: its specification, its committed status, and what this process observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.api import FlyerJobSpec, FlyerJobStatus, Phase
from flyer.api.phases import ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping

# Phases in which `assignment` reserves nodes.
HOLDING = frozenset(
    {Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING}
)
# Phases in which no other job can reserve the nodes. In Suspending the job is leaving them, and
# another job may have reserved them.
RESERVING = frozenset({Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING})
WAITING = frozenset({Phase.RESERVED, Phase.DRAINING})
ACTIVE = frozenset({Phase.STARTING, Phase.RUNNING})


@dataclass(frozen=True, slots=True)
class ObservedState:
    """Observed since the engine started; not committed."""

    activity_at: float = 0.0  # progress or a log line
    step: int | None = None
    exposed_percent: int | None = None
    progress_committed_at: float = 0.0
    # Time since which the attempt has no stream; None: it has one.
    stream_lost_at: float | None = None
    # Nodes whose pods are not up yet, as last reported.
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SentActions:
    """Actions sent to the driver since the engine started."""

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
    suspend: bool  # spec.suspend
    uid: str = ""  # of the object; empty: the driver's objects have none
    queue: str = ""
    suspend_by: str = "user"
    suspend_reason: str = ""
    requeue: int | None = None  # the attempt to requeue
    removed: bool = False
    observed: ObservedState = ObservedState()
    sent_actions: SentActions = SentActions()

    @property
    def holding(self) -> bool:
        """Whether the job's assignment reserves nodes."""
        return self.status.phase in HOLDING and self.status.assignment is not None

    @property
    def is_only_queued(self) -> bool:
        """Whether a step can do nothing for the job except give it nodes."""
        status, actions = self.status, self.sent_actions
        return (
            status.phase is Phase.QUEUED
            and not (self.suspend or self.removed or status.occupied or actions.stops)
            and actions.token is False
            and self.spec.stop is None
            and self.generation == status.observed_generation
        )

    @property
    def is_skippable(self) -> bool:
        """Whether, without a change, only the passing of time makes an action due."""
        status = self.status
        if self.ended:
            return self.sent_actions.finish and not status.occupied
        connected = self.observed.stream_lost_at is None  # else it depends on the streams of others
        return (
            status.phase is Phase.RUNNING
            and connected
            and not (status.exits or self.sent_actions.stops)
        )

    @property
    def ended(self) -> bool:
        """Whether the job has ended permanently."""
        return self.status.phase in ENDED


__all__ = ["ACTIVE", "HOLDING", "RESERVING", "WAITING", "JobState", "ObservedState", "SentActions"]

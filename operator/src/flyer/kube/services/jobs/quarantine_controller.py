"""Quarantine controller: steps the engine without quarantined jobs and sets their condition.

A job at which the engine fails is quarantined. It is removed from the engine's state in an ordinary
step, in which all other jobs are scheduled.
Only bringing jobs back costs a rebuild. `Quarantine` limits these: each retries a few jobs, and
rebuilds take a small share of the time, however many jobs are quarantined.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from flyer import engine
from flyer.api import Condition
from flyer.engine import (
    JobFault,
    JobQuarantined,
    JobSubmitted,
    NodeLost,
    NodeObserved,
    Tick,
)
from flyer.job_events import EVENT_DROPPED, JobEvent
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.services.errors import StaleStateError
from flyer.kube.services.jobs.commits import QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence

    from flyer.engine import Action, EngineState, Event
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.job_view import JobView
    from flyer.kube.metrics import Metrics
    from flyer.kube.services.jobs.commits import Commits
    from flyer.kube.services.jobs.quarantine import Quarantine
    from flyer.kube.services.jobs.submissions import Submissions
    from flyer.kube.services.nodes.nodes import Nodes

__all__ = ["JOBS_INLINE_MAX", "QuarantineController"]

# With more jobs the engine steps in a thread.
JOBS_INLINE_MAX: Final = 200

# Events whose facts a rebuild reads from the caches, newer than any queued event.
_READ_BY_REBUILD: Final = (
    JobSubmitted, NodeLost, NodeObserved, engine.NodeRemoved, engine.QuotaObserved,
    engine.QuotaRemoved, engine.TeamObserved, Tick, engine.ZonesObserved,
)  # fmt: skip
# Events of a quarantined job that need not be delivered later.
_EPHEMERAL: Final = (engine.LogObserved, engine.ProgressReported)

log = logging.getLogger(__name__)


class QuarantineController:
    """The controller of one term."""

    def __init__(
        self,
        cache: ClusterCache,
        quarantine: Quarantine,
        nodes: Nodes,
        commits: Commits,
        submissions: Submissions,
        metrics: Metrics,
        *,
        zones: Callable[[], engine.Zones],
        epoch: Callable[[], int],
        redact: Callable[[str, str], str],
        record_event: Callable[[str, JobEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._cache = cache
        self._quarantine = quarantine
        self._nodes = nodes
        self._commits = commits
        self._submissions = submissions
        self._metrics = metrics
        self._zones = zones
        self._epoch = epoch
        self._redact = redact
        self._record_event = record_event
        self._spawn = spawn
        # Events of quarantined jobs without a decision; a repeated event is retained once.
        self._retained: dict[object, Event] = {}
        self._marked: set[str] = set()  # jobs with the condition Quarantined

    # -- events --------------------------------------------------------------------------------

    def hold_back(self, events: Sequence[Event]) -> list[Event]:
        """The events that can be processed now. Those of quarantined jobs are retained."""
        ready = []
        for event in events:
            job = event.job.key if isinstance(event, JobSubmitted) else getattr(event, "job", "")
            if job not in self._quarantine:
                ready.append(event)
            elif not isinstance(event, (*_EPHEMERAL, *_READ_BY_REBUILD)):
                self._retain(event)
        return ready

    def retain(self, events: Iterable[Event]) -> None:
        """Retain events without a decision over a rebuild, except those that it reads."""
        for event in events:
            if not isinstance(event, _READ_BY_REBUILD):
                self._retain(event)

    def _retain(self, event: Event) -> None:
        key = _identity_of(event)
        self._retained.pop(key, None)
        self._retained[key] = event  # moved to the end: an event in between may be its opposite

    def take_retained(self) -> list[Event]:
        """The retained events that can be processed after a rebuild."""
        retained, self._retained = self._retained, {}
        return self.hold_back(list(retained.values()))

    # -- the step ------------------------------------------------------------------------------

    async def step(
        self, state: EngineState, events: Sequence[Event], now: float
    ) -> tuple[EngineState, tuple[Action, ...]]:
        """One step, without quarantined jobs, including those that fail in it.

        Each failing job repeats the step. StaleStateError: a job fails although it is removed.
        """
        while True:
            started = time.monotonic()
            step_events = [*self._removals(state.jobs), *events]
            try:
                # On a large cluster a step takes long enough to delay the Lease and signals.
                if len(state.jobs) > JOBS_INLINE_MAX:
                    stepped = asyncio.to_thread(engine.step, state, step_events, now)
                    return await asyncio.shield(stepped)
                return engine.step(state, step_events, now)
            except JobFault as fault:
                log.exception("a bug, please report it")
                repeated = self._quarantine.is_suspect(fault.job)
                events = self._without(fault, events)
                if repeated:
                    self._quarantine.record_rebuild(time.monotonic() - started)
                await asyncio.sleep(0)  # let other tasks run in between

    def _without(self, fault: JobFault, events: Sequence[Event]) -> list[Event]:
        why = f"{fault}: {fault.__cause__!r:.400}"
        if fault.event is None or isinstance(fault.event, (JobSubmitted, JobQuarantined)):
            if fault.job in self._quarantine:
                raise StaleStateError(why) from fault
            self._quarantine.add(fault.job, why)
            return self.hold_back(events)
        self._metrics.faults.labels("event").inc()
        self._record_event(fault.job, JobEvent(EVENT_DROPPED, why, warning=True))
        return [event for event in events if event is not fault.event]

    def _removals(self, job_keys: Collection[str]) -> list[Event]:
        """Events that remove the quarantined jobs from the engine and withhold their nodes."""
        jobs = [job for job in self._quarantine if job in job_keys]
        if not jobs:
            return []
        for job in jobs:
            self._submissions.quarantined(job)
            self._commits.quarantined(job)
        self._metrics.quarantined_jobs.set(len(self._quarantine))
        nodes = self._nodes.withhold(self._quarantine.withheld_nodes(self._commits.stored))
        return [*map(JobQuarantined, jobs), *nodes, engine.ZonesObserved(self._zones())]

    # -- the condition Quarantined -------------------------------------------------------------

    def reset(self, live: Iterable[JobView]) -> None:
        """The engine was rebuilt from these."""
        self._marked = {view.key for view in live if _is_marked(view)}

    def unmark(self, job_keys: Collection[str]) -> None:
        """Remove the condition of these jobs, which a step has processed."""
        for key in self._marked:
            if key in job_keys and key not in self._quarantine:
                self.mark(key, None)
        self._marked.clear()

    def mark(self, key: str, why: str | None) -> None:
        """Set the job's condition Quarantined to this reason; None: remove the condition."""
        view = self._cache.job(key)
        if view is None:
            return
        condition = None
        if why is not None:
            condition = Condition(
                type=QUARANTINED, status="True", reason="OperatorFault",
                message=self._redact(why, key),
                last_transition_time=time.time(),
            )  # fmt: skip
        self._spawn(self._write_condition(key, view.uid, condition), f"mark {key}")

    async def _write_condition(self, key: str, uid: str, condition: Condition | None) -> None:
        try:
            await self._commits.mark(key, uid, self._epoch(), condition)
        except ApiError as error:
            log.warning("%s: cannot write the condition Quarantined: %s", key, error)


def _identity_of(event: Event) -> object:
    """Only the latest of several events with the same identity counts."""
    match event:
        case engine.CheckpointReported(job=job, attempt=attempt, durable=durable, uid=uid):
            return type(event), job, uid, attempt, durable
        case engine.UserStateSet(job=job, attempt=attempt, uid=uid):
            return type(event), job, uid, attempt
        case _:
            return event


def _is_marked(view: JobView) -> bool:
    status = view.job.status if view.job is not None else None
    return status is not None and status.condition(QUARANTINED) is not None

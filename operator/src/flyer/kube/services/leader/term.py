"""Leader term: observe, decide, commit, act. Everything runs in one event loop.

`_advance` is the only caller of the engine's step. It stores the commits first, then performs the
other actions; their effects return as events. Only statuses that merely explain why jobs wait are
stored by a separate task. A decision is in the job's status before it is acted on, so the process
may die at any point: the next leader reads the statuses, reports the observed cluster to the engine
and continues. No state outlives a term.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer import engine
from flyer.engine import (
    Commit,
    Finish,
    HoldToken,
    JobRemoved,
    JobSubmitted,
    ReleaseToken,
    Signal,
    Start,
    Stop,
    Tick,
    WakeAt,
)
from flyer.job_events import QUARANTINED, JobEvent, recorded_event
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.cache.cluster_cache import Listener, TermOverError
from flyer.kube.services.errors import QuarantinedError, StaleStateError
from flyer.kube.services.jobs.commits import Commits
from flyer.kube.services.jobs.event_queue import EventQueue, leaving
from flyer.kube.services.jobs.event_recorder import EventRecorder
from flyer.kube.services.jobs.expiry import Expiry
from flyer.kube.services.jobs.explanations import Explanations
from flyer.kube.services.jobs.published_status import Redactor
from flyer.kube.services.jobs.quarantine import Quarantine
from flyer.kube.services.jobs.quarantine_controller import QuarantineController
from flyer.kube.services.jobs.quota_status import QuotaStatusReporter
from flyer.kube.services.jobs.submissions import Submissions
from flyer.kube.services.jobs.token import Token
from flyer.kube.services.leader.observer import Observer
from flyer.kube.services.leader.resync import Resync
from flyer.kube.services.nodes.nodes import Nodes
from flyer.kube.services.nodes.probes import NodeProber
from flyer.kube.services.pods.adoption import Adoption
from flyer.kube.services.pods.gangs import Gangs
from flyer.kube.services.pods.pod_control import PodControl
from flyer.kube.services.pods.templates import PodTemplates

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from flyer.api import FlyerJob, FlyerJobStatus
    from flyer.engine import Action, EngineState, Event, JobState, SchedulerSettings, Zones
    from flyer.kube.apiserver import Api
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.job_view import JobView
    from flyer.kube.metrics import Metrics
    from flyer.kube.services.dependencies import Dependencies

__all__ = ["LeaderTerm"]

# Longest sleep of the loop, so that a change of the system clock cannot stop it.
IDLE_SECONDS_MAX: Final = 30.0
REBUILD_SECONDS: Final = 0.1
REBUILD_SECONDS_MAX: Final = 10.0

log = logging.getLogger(__name__)


class LeaderTerm:
    """Leads from `run` until it is cancelled or leadership is lost."""

    def __init__(
        self,
        api: Api,
        cache: ClusterCache,
        dependencies: Dependencies,
        settings: SchedulerSettings,
        metrics: Metrics,
        *,
        epoch: int,
        raise_epoch: Callable[[int], Awaitable[int]],
        instance: str = "flyer-operator",
    ) -> None:
        self.epoch = epoch
        self.ticked_at = time.monotonic()
        self.ready = asyncio.Event()  # set while the term serves
        self.served = False  # whether it has ever served
        self._api = api
        self._cache = cache
        self._scheduler_settings = settings
        self._metrics = metrics
        self._event_queue = EventQueue(
            lambda key: leaving(self._state_of(key), time.time()),
            lambda key: self._state_of(key) is not None,
        )
        self._token = Token(api)
        self._resync = Resync(api, cache, self._token, raise_epoch)
        self._quota_status = QuotaStatusReporter(api, cache, self._token, lambda: self._state)
        self._recorder = EventRecorder(api, instance)
        self._expiry = Expiry(api, cache, time.time)
        pod_control = PodControl(api, cache.pods)
        self._quarantine = Quarantine(self._on_quarantined, lambda: self._event_queue.add(Tick()))
        self._redactor = Redactor(self._was_job)
        self._commits = Commits(
            api, cache.jobs, self._uid_of, self._committed, pod_control.limiter, self._quarantine
        )
        self._explanations = Explanations(
            self._commits, self._uid_of,
            vanished=lambda job, uid: self._event_queue.add(JobRemoved(job, uid=uid)),
            request_rebuild=self.request_rebuild,
        )  # fmt: skip
        templates = PodTemplates(api, cache, dependencies.pod_settings, self._spawn)
        self._submissions = Submissions(
            api, cache, self._recorder, self._quarantine, templates, self._commits,
            epoch=lambda: self.epoch, record_event=self._record_event,
            enqueue=self._event_queue.add, spawn=self._spawn, request_rebuild=self.request_rebuild,
        )  # fmt: skip
        self._gateway = dependencies.make_gateway(self._event_queue.add)
        self._gangs = Gangs(
            api, cache, self._gateway, pod_control, templates, outcome_of=dependencies.outcome_of,
            enqueue=self._event_queue.add, state_of=self._state_of, uid_of=self._uid_of,
            spawn=self._spawn,
        )  # fmt: skip
        self._adoption = Adoption(api, cache, self._gangs)
        self._state: EngineState = engine.rebuild((), (), time.time(), epoch, settings)
        self._nodes = Nodes(cache, self._event_queue.add)
        self._quarantine_controller = QuarantineController(
            cache, self._quarantine, self._nodes, self._commits, self._submissions, metrics,
            zones=self._zones, epoch=lambda: self.epoch, redact=self._redactor.redact,
            record_event=self._record_event, spawn=self._spawn,
        )  # fmt: skip
        self._observer = Observer(
            cache, self._quarantine, self._submissions, self._gangs, self._nodes, pod_control,
            state=lambda: self._state, zones=self._zones, enqueue=self._event_queue.add,
            spawn=self._spawn,
        )  # fmt: skip
        self._listener = Listener(
            job_changed=self._submissions.changed, pod_changed=self._observer.pod_changed,
            node_changed=self._nodes.changed, topology_changed=self._observer.topology_changed,
            enqueue=self._event_queue.add, request_rebuild=self.request_rebuild,
        )  # fmt: skip
        self._probes = NodeProber(
            cache, self._gateway, self._nodes, dependencies.probe, self._spawn
        )
        self._wake_at = 0.0
        self._rebuild_reason = ""  # why the engine's state has to be rebuilt; empty: it is current
        self._group: asyncio.TaskGroup | None = None

    @property
    def serving(self) -> bool:
        """Whether the resync is complete and the gateway listens."""
        return self.ready.is_set()

    @property
    def state(self) -> EngineState:
        """The engine's state, for reading."""
        return self._state

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Lead. Raises the error that ended the term, such as LeadershipLostError, in a group."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._recorder.run(), name="events")
                group.create_task(self._quota_status.run(), name="counts")
                self.epoch = await self._resync.run(self.epoch)
                self._cache.listener = self._listener
                await self._rebuild()
                # Not earlier: sidecars of gangs that are not adopted yet would be refused, and
                # thousands of handshakes would delay the adoption.
                group.create_task(self._gateway.serve(), name="gateway")
                group.create_task(self._probes.run(), name="probes")
                group.create_task(self._expiry.run(), name="expiry")
                group.create_task(self._explanations.run(), name="explanations")
                self.ready.set()
                self.served = True
                await self._loop()
        finally:
            self.ready.clear()
            self._group = None
            if self._cache.listener is self._listener:
                self._cache.listener = None

    async def _loop(self) -> None:
        pause_seconds = REBUILD_SECONDS
        while True:
            self.ticked_at = time.monotonic()
            due_seconds = min(self._wake_at - time.time(), self._quarantine.wait_seconds())
            await self._event_queue.wait(max(0.0, min(due_seconds, IDLE_SECONDS_MAX)))
            events = self._quarantine_controller.hold_back(self._event_queue.take())
            if self._quarantine.wait_seconds() <= 0:
                self._quarantine_controller.retain(events)
                pause_seconds = await self._rebuild_until_done(pause_seconds, at_once=True)
                continue
            try:
                await self._advance(events or [Tick()])
                pause_seconds = REBUILD_SECONDS
            except (StaleStateError, ApiError) as error:
                log.warning("rebuilding scheduler state: %s", error)
                self._quarantine_controller.retain(events)
                if isinstance(error, QuarantinedError):  # must not prolong the others' pause
                    pause_seconds = REBUILD_SECONDS
                pause_seconds = await self._rebuild_until_done(pause_seconds)

    async def _rebuild_until_done(self, pause_seconds: float, *, at_once: bool = False) -> float:
        """Rebuild until the API server permits it. Returns the next pause."""
        while True:
            self._metrics.rebuilds.inc()
            if not at_once:
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, REBUILD_SECONDS_MAX)
            at_once = False
            self.ticked_at = started = time.monotonic()
            try:
                await self._rebuild()
            except ApiError as error:
                log.warning("rebuilding scheduler state again: %s", error)
            else:
                self._quarantine.record_rebuild(time.monotonic() - started)
                return pause_seconds

    def _spawn(
        self, work: Coroutine[Any, Any, None], name: str, job: str = ""
    ) -> asyncio.Task[None]:
        """Start a task of this term. A failing task of a job quarantines that job."""
        whole = self._quarantine.shield(job, name, work) if job else work
        try:
            if self._group is not None:
                return self._group.create_task(whole, name=name)
        except RuntimeError:  # the group is shutting down
            pass
        whole.close()
        work.close()
        raise TermOverError(name)

    # -- rebuild -------------------------------------------------------------------------------

    async def _rebuild(self) -> None:
        """Build the engine's state from the jobs, and report the observed cluster to it.

        Events without a decision are queued again, except those that the rebuild reads anew.
        """
        self._quarantine_controller.retain(self._event_queue.take_all())
        self._quarantine.release_due()
        self._metrics.quarantined_jobs.set(len(self._quarantine))
        self._nodes.withheld = self._quarantine.withheld_nodes(self._commits.stored)
        for view in self._cache.jobs.values():
            self._nodes.withheld |= dict.fromkeys(view.kept_nodes, view.key)
        nodes = self._nodes.reset()
        views = {view.job.key: view for view in self._cache.jobs.values() if view.job is not None}
        live = {
            key: view for key, view in views.items()
            if self._submissions.is_eligible(view) and self._submissions.template_passed(view)
        }  # fmt: skip
        jobs = [_job_of(view) for view in live.values()]
        quotas = [
            engine.Quota.of(quota) for quota in self._cache.quotas.values() if quota is not None
        ]
        quarantined = [
            _job_of(views[key]).replace(status=status)
            for key, status in self._quarantine.possible_statuses(self._commits.stored)
            if key in views
        ]
        self._state = engine.rebuild(
            nodes, jobs, time.time(), self.epoch, self._scheduler_settings, quotas,
            self._zones(), quarantined, self._cache.teams(),
        )  # fmt: skip
        self._event_queue.reset([])
        self._explanations.clear()
        self._rebuild_reason = ""
        self._submissions.reset(live)
        self._commits.reset(live.values())
        self._nodes.report_losses()
        self._gangs.forget_all_but({
            view.key: view.uid for view in self._cache.jobs.values() if not view.forgettable
        })  # fmt: skip
        for key, view in live.items():
            if view.deleting:
                self._event_queue.add(JobRemoved(key, uid=view.uid))
            with self._quarantine.guard(key, "adopting its gang"):
                await self._adoption.adopt(_job_of(view))
        self._quarantine_controller.reset(live.values())
        for view in list(self._cache.jobs.values()):
            if view.job is None:
                self._submissions.report_invalid(view)
            elif view.deleting and view.key not in live and view.key not in self._quarantine:
                self._submissions.forget(view.key)
        # A job of the holder's name may be another object by now, without nodes.
        with_nodes = {job.key for job in jobs if job.status is not None and job.status.occupied}
        if self._token.holder and self._token.holder not in {*with_nodes, *self._quarantine}:
            await self._token.release(self._token.holder)
        self._observer.check_pods()
        for event in self._quarantine_controller.take_retained():
            self._event_queue.add(event)
        self._event_queue.add(Tick())

    # -- the step ------------------------------------------------------------------------------

    async def _advance(self, events: Sequence[Event]) -> None:
        """Step the engine and perform its actions. Not re-entered: effects only queue events."""
        if self._rebuild_reason:
            raise StaleStateError(self._rebuild_reason)
        now = max(time.time(), self._state.now)
        started = time.monotonic()
        job_keys = self._state.jobs.keys() | {
            event.job.key for event in events if isinstance(event, JobSubmitted)
        }
        self._state, actions = await self._quarantine_controller.step(self._state, events, now)
        self._event_queue.record_step(time.monotonic() - started)
        self._metrics.decided(time.monotonic() - started)
        self._wake_at = now + IDLE_SECONDS_MAX
        commits = [
            self._redactor.publish(action, self._state, self._cache.healths)
            for action in actions if isinstance(action, Commit)
        ]  # fmt: skip
        commits = self._explanations.defer(commits)
        deleted_jobs: set[str] = set()
        await self._commits.store(commits, deleted_jobs)
        self._gateway.stored(events)
        for commit in commits:
            if commit.job in deleted_jobs:
                self._event_queue.add(JobRemoved(commit.job, uid=commit.uid))
        for action in actions:
            with self._quarantine.guard(getattr(action, "job", ""), type(action).__name__):
                await self._perform(action, deleted_jobs)
        self._commits.answers.clear()
        for commit in commits:
            self._gangs.forget_if_over(commit.job)
        for key in job_keys - self._state.jobs.keys():
            self._explanations.forget(key)
            if key not in self._quarantine:
                self._commits.forget(key)
                self._submissions.forget(key)
        self._quarantine_controller.unmark(self._state.jobs)
        self._metrics.observe(self._state, self._token.holder)
        self._quota_status.mark_dirty()

    async def _perform(self, action: Action, deleted_jobs: set[str]) -> None:
        match action:
            case Start(job=key, uid=uid) if key not in deleted_jobs:
                view = self._cache.job(key)
                if view is not None and view.job is not None and view.uid == uid:
                    self._gangs.start(view.job, action, self._commits.answers.get(key))
            case Stop():
                self._gangs.stop(action)
            case Signal(job=key, reason=reason, by=by):
                reason, by = (self._redactor.redact(text, key) for text in (reason, by))
                self._gateway.signal(replace(action, reason=reason, by=by))
            case HoldToken(job=key) if key not in deleted_jobs:
                await self._token.hold(key)
            case ReleaseToken(job=key):
                await self._token.release(key)
            case Finish(job=key, uid=uid):
                self._gangs.forget(key, uid)
                # The engine need not keep it: its status is final.
                self._event_queue.add(JobRemoved(key, uid=uid))
            case WakeAt(time=moment):
                self._wake_at = min(self._wake_at, moment)

    def _committed(self, key: str, before: FlyerJobStatus | None, after: FlyerJobStatus) -> None:
        with self._quarantine.guard(key, "recording an event"):
            self._metrics.committed(before, after)
            event = recorded_event(before, after)
            if event is not None:
                self._record_event(key, event)

    def _record_event(self, key: str, event: JobEvent) -> None:
        view = self._cache.job(key)
        if view is not None and not view.deleting:
            event = replace(event, message=self._redactor.redact(event.message, key))
            self._recorder.record(key, view.uid, event)

    def _on_quarantined(self, key: str, kind: str, why: str) -> None:
        self._metrics.faults.labels(kind).inc()
        self._record_event(key, JobEvent(QUARANTINED, why, warning=True))
        if kind != "status":  # otherwise the API server rejects every status of the job
            self._quarantine_controller.mark(key, why)

    def _zones(self) -> Zones:
        """The zones, without cross-zone jobs while a quarantined job may hold the token."""
        zones = self._cache.zones()
        return (
            replace(zones, cross_zone_jobs=0) if self._token.holder in self._quarantine else zones
        )

    def _was_job(self, key: str) -> bool:
        return key in self._state.jobs or self._cache.job(key) is not None

    def _uid_of(self, key: str) -> str | None:
        return self._submissions.uid_of(key)

    def _state_of(self, key: str) -> JobState | None:
        return self._state.jobs.get(key)

    def request_rebuild(self, why: str) -> None:
        """Rebuild the engine's state before the next step."""
        self._rebuild_reason = why
        self._event_queue.add(Tick())


def _job_of(view: JobView) -> FlyerJob:
    assert view.job is not None, "not a job"
    return view.job

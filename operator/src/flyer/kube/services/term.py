"""One leader's term: observe, decide, commit, act. Everything runs in one event loop.

`_advance` is the only place where the engine is stepped. It performs the commits first and then the
rest; effects report back as events. Only the statuses that explain why jobs wait are stored beside
it. Whatever matters is in the jobs' statuses before it is acted on, so the process may die at any
point: the next leader reads the statuses, tells the engine what it sees, and goes on. Nothing of a
term outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer import engine
from flyer.api import FlyerJob, FlyerJobStatus, Phase
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
from flyer.job_events import NEVER_FITS, QUARANTINED, JobEvent, recorded_event
from flyer.kube.client.errors import ApiError
from flyer.kube.client.resources import PODS
from flyer.kube.pods.names import LABEL_JOB
from flyer.kube.services.announcements import Announcer
from flyer.kube.services.apart import LeftAlone
from flyer.kube.services.commits import Commits, refused_status
from flyer.kube.services.counts import Counts
from flyer.kube.services.errors import LeftAloneError, StaleStateError, TermOverError
from flyer.kube.services.expiry import Expiry
from flyer.kube.services.explanations import Explanations
from flyer.kube.services.gangs import Gangs
from flyer.kube.services.inbox import Inbox, leaving
from flyer.kube.services.nodes import Nodes
from flyer.kube.services.observer import Observer
from flyer.kube.services.podcalls import pod_lane
from flyer.kube.services.privacy import Privacy
from flyer.kube.services.probes import Probes
from flyer.kube.services.quarantine import Quarantine
from flyer.kube.services.steps import Steps
from flyer.kube.services.submissions import Submissions
from flyer.kube.services.takeover import TakeOver
from flyer.kube.services.templates import Templates
from flyer.kube.services.token import Token
from flyer.kube.services.waysback import with_ways_back

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from flyer.engine import Action, EngineState, Event, JobState, Policy, Zones
    from flyer.kube.client import Api
    from flyer.kube.metrics import Metrics
    from flyer.kube.services.seams import Seams
    from flyer.kube.services.views import JobView
    from flyer.kube.services.world import World

__all__ = ["Term"]

# The loop wakes at least so often, so that a clock that was set cannot stop it.
IDLE_SECONDS_MAX: Final = 30.0
REBUILD_SECONDS: Final = 0.1
REBUILD_SECONDS_MAX: Final = 10.0
_LIVE: Final = (Phase.RUNNING, Phase.SUSPENDING)

log = logging.getLogger(__name__)


class Term:
    """Leads from `run` until it is cancelled or the right to write is lost."""

    def __init__(
        self,
        api: Api,
        world: World,
        seams: Seams,
        policy: Policy,
        metrics: Metrics,
        *,
        epoch: int,
        raise_epoch: Callable[[int], Awaitable[int]],
        instance: str = "flyer-operator",
    ) -> None:
        self.epoch = epoch
        self.ticked_at = time.monotonic()
        self.ready = asyncio.Event()  # it serves
        self.served = False  # it does, or did
        self._api = api
        self._world = world
        self._policy = policy
        self._metrics = metrics
        self._inbox = Inbox(
            lambda key: leaving(self._state_of(key), time.time()),
            lambda key: self._state_of(key) is not None,
        )
        self._token = Token(api)
        self._takeover = TakeOver(api, world, self._token, raise_epoch)
        self._counts = Counts(api, world, self._token, lambda: self._state)
        self._announcer = Announcer(api, instance)
        self._expiry = Expiry(api, world, time.time)
        lane = pod_lane()
        self._left = LeftAlone(self._left_alone, lambda: self._inbox.tell(Tick()))
        self._privacy = Privacy(self._was_job)
        self._commits = Commits(api, world.jobs, self._uid_of, self._committed, lane, self._left)
        self._explanations = Explanations(
            self._commits, self._uid_of,
            gone=lambda job: self._inbox.tell(JobRemoved(job)), confused=self.confused,
        )  # fmt: skip
        self._templates = Templates(
            api, world, seams,
            passed=self._resubmit,
            refused=self._refuse_template, spawn=self._spawn,
        )  # fmt: skip
        self._submissions = Submissions(
            api, world, self._announcer, self._left, self._templates,
            tell=self._inbox.tell, spawn=self._spawn, rebuild=self.confused,
        )  # fmt: skip
        self._gateway = seams.make_gateway(self._inbox.tell)
        self._gangs = Gangs(
            api, world, self._gateway, seams, lane=lane,
            tell=self._inbox.tell, state_of=self._state_of, uid_of=self._uid_of,
            spawn=self._spawn, templates=self._templates,
        )  # fmt: skip
        self._state: EngineState = engine.rebuild((), (), time.time(), epoch, policy)
        self._nodes = Nodes(world, self._inbox.tell)
        self._quarantine = Quarantine(
            world, self._left, self._nodes, self._commits, self._submissions, metrics,
            zones=self._zones, epoch=lambda: self.epoch, words=self._privacy.words,
            spawn=self._spawn,
        )  # fmt: skip
        self._steps = Steps(self._left, self._quarantine, metrics, self._announce)
        self._observer = Observer(
            world, self._left, self._submissions, self._commits, self._gangs, self._nodes,
            state=lambda: self._state, zones=self._zones, tell=self._inbox.tell,
            confused=self.confused,
        )  # fmt: skip
        self._probes = Probes(world, self._gateway, self._nodes, seams.probe, self._spawn)
        self._wake_at = 0.0
        self._stale = ""  # why everything has to be read again
        self._group: asyncio.TaskGroup | None = None

    @property
    def serving(self) -> bool:
        """Whether it has taken over, and the gateway listens."""
        return self.ready.is_set()

    @property
    def state(self) -> EngineState:
        """The engine's state, for questions."""
        return self._state

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Lead. Raises what ended the term, LeadershipLostError for one, in a group."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._announcer.run(), name="events")
                group.create_task(self._counts.run(), name="counts")
                await self._open()
                # Not before: sidecars of gangs that nobody knows yet would be sent away, and
                # thousands of handshakes take the time in which they become known.
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
            if self._world.listener is self._observer:
                self._world.listener = None

    async def _open(self) -> None:
        self.epoch = await self._takeover.run(self.epoch)
        self._world.listener = self._observer
        await self._rebuild()

    async def _loop(self) -> None:
        pause_seconds = REBUILD_SECONDS
        while True:
            self.ticked_at = time.monotonic()
            due_seconds = min(self._wake_at - time.time(), self._left.wait_seconds())
            await self._inbox.wait(max(0.0, min(due_seconds, IDLE_SECONDS_MAX)))
            events = self._quarantine.aside(self._inbox.take())
            if self._left.wait_seconds() <= 0:
                self._quarantine.keep(events)
                pause_seconds = await self._read_again(pause_seconds, at_once=True)
                continue
            try:
                await self._advance(events or [Tick()])
                pause_seconds = REBUILD_SECONDS
            except (StaleStateError, ApiError) as error:
                log.warning("everything is read again: %s", error)
                self._quarantine.keep(events)
                if isinstance(error, LeftAloneError):  # others do not wait the longer for it
                    pause_seconds = REBUILD_SECONDS
                pause_seconds = await self._read_again(pause_seconds)

    async def _read_again(self, pause_seconds: float, *, at_once: bool = False) -> float:
        """Rebuild, as often as the API server makes it necessary; the next pause."""
        while True:
            self._metrics.rebuilds.inc()
            if not at_once:
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, REBUILD_SECONDS_MAX)
            at_once = False
            self.ticked_at = begun = time.monotonic()
            try:
                await self._rebuild()
            except ApiError as error:
                log.warning("everything is read again: %s", error)
            else:
                self._left.spent(time.monotonic() - begun)
                return pause_seconds

    def _spawn(
        self, work: Coroutine[Any, Any, None], name: str, job: str = ""
    ) -> asyncio.Task[None]:
        """A task of this term. One about a job quarantines that job where it fails."""
        whole = self._left.shield(job, name, work) if job else work
        try:
            if self._group is not None:
                return self._group.create_task(whole, name=name)
        except RuntimeError:  # the group takes nothing more
            pass
        whole.close()
        work.close()
        raise TermOverError(name)

    # -- taking over ---------------------------------------------------------------------------

    async def _rebuild(self) -> None:
        """Make the engine's state from the jobs, and tell it what is to be seen.

        What was told but not decided is told again, unless it is read anew here.
        """
        self._quarantine.keep(self._inbox.take_all())
        self._left.release()
        self._metrics.left_alone.set(len(self._left))
        self._nodes.withheld = self._left.nodes(self._commits.stored)
        for view in self._world.jobs.values():
            self._nodes.withheld |= dict.fromkeys(view.kept_nodes, view.key)
        nodes = self._nodes.begin()
        views = {view.job.key: view for view in self._world.jobs.values() if view.job is not None}
        live = {
            key: view for key, view in views.items()
            if self._submissions.wanted(view) and self._submissions.passed(view)
        }  # fmt: skip
        jobs = [_of(view) for view in live.values()]
        quotas = [engine.Quota.of(one) for one in self._world.quotas.values() if one is not None]
        apart = [
            _of(views[key]).replace(status=status)
            for key, status in self._left.statuses(self._commits.stored)
            if key in views
        ]
        self._state = engine.rebuild(
            nodes, jobs, time.time(), self.epoch, self._policy, quotas, self._zones(), apart,
            self._world.teams(),
        )  # fmt: skip
        self._inbox.keep([])
        self._explanations.clear()
        self._stale = ""
        self._submissions.begin(live)
        self._commits.begin(live.values())
        self._nodes.tell_losses()
        for key, view in live.items():
            if view.deleting:
                self._inbox.tell(JobRemoved(key))
            with self._left.guard(key, "taking over"):
                await self._adopt(_of(view))
        self._quarantine.begin(live.values())
        for view in list(self._world.jobs.values()):
            if view.job is None:
                self._submissions.tell_invalid(view)
            elif view.deleting and view.key not in live and view.key not in self._left:
                self._submissions.forgotten(view.key)
        if self._token.holder and self._token.holder not in {*live, *self._left}:
            await self._token.release(self._token.holder)
        self._observer.see_pods()
        for event in self._quarantine.take_kept():
            self._inbox.tell(event)
        self._inbox.tell(Tick())

    async def _adopt(self, job: FlyerJob) -> None:
        """Go on with the gang of a job that has one."""
        status = job.status
        if status is None or not status.occupied:
            return
        attempt, assignment = status.chain.attempt, status.assignment
        # Whatever its phase: a node without a living pod is given to the next job.
        pods = self._world.pods_of(job.key, job.metadata.uid)
        living = {one.node for one in pods if not one.ended}
        if not living.issuperset(one.name for one in status.occupied):
            await self._confirm(job)
        if status.phase in _LIVE and assignment is not None:
            self._gangs.adopt(
                job,
                Start(job.key, attempt, assignment, status.checkpoint, status.chain.life_state),
            )
        for pod in self._world.pods_of(job.key, job.metadata.uid):
            self._gangs.locate(pod)
            if pod.ended and pod.attempt == attempt:
                self._gangs.conclude(pod)
        self._gangs.look(job.key)

    async def _confirm(self, job: FlyerJob) -> None:
        """Pods seem to be missing: ask for them, for a watch may be late."""
        selector = f"{LABEL_JOB}={job.metadata.name}"
        for pod in await self._api.list(PODS, job.metadata.namespace, labelSelector=selector):
            self._world.pods.offer(pod)

    # -- the step ------------------------------------------------------------------------------

    async def _advance(self, events: Sequence[Event]) -> None:
        """Step the engine and do what it decides. Never re-entered: effects only queue events."""
        if self._stale:
            raise StaleStateError(self._stale)
        now = max(time.time(), self._state.now)
        begun = time.monotonic()
        known = self._state.jobs.keys() | {
            one.job.key for one in events if isinstance(one, JobSubmitted)
        }
        self._state, actions = await self._steps.step(self._state, events, now)
        self._inbox.stepped(time.monotonic() - begun)
        self._metrics.decided(time.monotonic() - begun)
        self._wake_at = now + IDLE_SECONDS_MAX
        commits = [
            replace(one, status=self._shown(one)) for one in actions if isinstance(one, Commit)
        ]  # fmt: skip
        commits = self._explanations.put_aside(commits)
        gone: set[str] = set()
        await self._commits.store(commits, gone)
        self._gateway.stored(events)
        for job in gone:
            self._inbox.tell(JobRemoved(job))
        for action in actions:
            with self._left.guard(getattr(action, "job", ""), type(action).__name__):
                await self._perform(action, gone)
        self._commits.answers.clear()
        for commit in commits:
            self._settle(commit.job)
        for key in known - self._state.jobs.keys():
            self._explanations.forgotten(key)
            if key not in self._left:
                self._commits.forgotten(key)
                self._submissions.forgotten(key)
        self._quarantine.unmark(self._state.jobs)
        self._metrics.observe(self._state, self._token.holder)
        self._counts.look()

    def _shown(self, commit: Commit) -> FlyerJobStatus:
        """The status as those who may read this job alone may see it."""
        status = self._privacy.status(commit.status, commit.job)
        healths = self._world.healths
        return with_ways_back(status, self._state.nodes.get, lambda name: healths.get("", name))

    async def _perform(self, action: Action, gone: set[str]) -> None:
        match action:
            case Start(job=key) if key not in gone:
                view = self._world.job(key)
                if view is not None and view.job is not None:
                    self._gangs.start(view.job, action, self._commits.answers.get(key))
            case Stop():
                self._gangs.stop(action)
            case Signal(job=key, reason=reason, by=by):
                reason, by = (self._privacy.words(one, key) for one in (reason, by))
                self._gateway.signal(replace(action, reason=reason, by=by))
            case HoldToken(job=key) if key not in gone:
                await self._token.hold(key)
            case ReleaseToken(job=key):
                await self._token.release(key)
            case Finish(job=key):
                self._gangs.forget(key)
                # The engine need not remember it: its status does, and nothing will change it.
                self._inbox.tell(JobRemoved(key))
            case WakeAt(time=moment):
                self._wake_at = min(self._wake_at, moment)

    def _settle(self, key: str) -> None:
        """After a job's commit: an attempt may be over."""
        job = self._state.jobs.get(key)
        waits = job is not None and job.status.phase in (Phase.QUEUED, Phase.SUSPENDED)
        if waits and job is not None and not job.status.occupied:
            self._gangs.forget(key)

    def _committed(self, key: str, before: FlyerJobStatus | None, after: FlyerJobStatus) -> None:
        with self._left.guard(key, "announcing"):
            self._metrics.committed(before, after)
            told = recorded_event(before, after)
            if told is not None:
                self._announce(key, told)

    def _announce(self, key: str, told: JobEvent) -> None:
        view = self._world.job(key)
        if view is not None and not view.deleting:
            told = replace(told, message=self._privacy.words(told.message, key))
            self._announcer.tell(key, view.uid, told)

    def _left_alone(self, key: str, kind: str, why: str) -> None:
        self._metrics.faults.labels(kind).inc()
        self._announce(key, JobEvent(QUARANTINED, why, warning=True))
        if kind != "status":  # else no status of it is taken
            self._quarantine.mark(key, why)

    def _resubmit(self, view: JobView) -> None:
        self._submissions.resubmit(view)

    async def _refuse_template(self, view: JobView, why: str) -> None:
        """Its status says so; the engine does not know it."""
        if self._submissions.uid_of(view.key) == view.uid or view.job is None:
            return  # known since before its template was changed: its start will say so
        status = refused_status(view.job, why, self.epoch, time.time())
        if await self._commits.write(view, status):
            self._announce(view.key, JobEvent(NEVER_FITS, why, warning=True))

    def _zones(self) -> Zones:
        """No second job crosses zones while one that is left alone may."""
        zones = self._world.zones()
        return replace(zones, cross_zone_jobs=0) if self._token.holder in self._left else zones

    def _was_job(self, key: str) -> bool:
        return key in self._state.jobs or self._world.job(key) is not None

    def _uid_of(self, key: str) -> str | None:
        return self._submissions.uid_of(key)

    def _state_of(self, key: str) -> JobState | None:
        return self._state.jobs.get(key)

    def confused(self, why: str) -> None:
        """Everything has to be read again."""
        self._stale = why
        self._inbox.tell(Tick())


def _of(view: JobView) -> FlyerJob:
    assert view.job is not None, "not a job"
    return view.job

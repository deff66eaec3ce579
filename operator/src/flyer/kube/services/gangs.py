"""Gangs as pods: create and bind them all, end them, and see when their nodes are empty.

Every call may be repeated: a pod that is there is used, one that is bound is left. Whether a node
is empty is judged from what is there, never from what was done (`look`): a node of a gang is empty
when no pod of this or an earlier attempt of the job is on it, in any phase in which a process may
live, and no more pods are being made.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flyer.api import Duration, Phase, PodTemplate, SuspendCode
from flyer.engine import Failed, NodeEmptied, PodExited, RequeueRequested, Start, StartRefused
from flyer.kube.changes import Changes
from flyer.kube.client.election import LeadershipLostError
from flyer.kube.client.errors import ApiError, InvalidError, NotFoundError
from flyer.kube.client.resources import FLYERJOBS
from flyer.kube.gateway.identities import PodIdentity
from flyer.kube.pods import PlacedNode, PodsRefusedError
from flyer.kube.services.podcalls import KILL_SECONDS, PodCalls
from flyer.kube.services.starts import Starts
from flyer.kube.services.templates import UnfitNowError
from flyer.kube.services.views import mark_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Event, JobState, Stop
    from flyer.kube.client import Api, Lane
    from flyer.kube.services.seams import Gateway, Seams
    from flyer.kube.services.templates import Templates
    from flyer.kube.services.views import PodView
    from flyer.kube.services.world import World

__all__ = ["Gangs"]

# BSD's EX_CANTCREAT, as on one machine: the pods could not be made, and never will be.
EXIT_NOT_STARTED: Final = 73
# A job that was told to go, or is over, ends by itself, and its logs stay readable: a deleted pod's
# do not. So does a pod whose launcher hears that it shall kill its ranks. A kubelet says seconds
# later that a container has ended; less than the engine's patience.
LINGER_SECONDS: Final = 8.0
# Others wait for the nodes of a job that released them, and its ranks may sleep through a SIGTERM.
LINGER_RELEASED_SECONDS: Final = 0.5  # after the four that the inbox has waited for them
# Who has had its time and is killed from inside after it: a second until SIGKILL, and the kubelet.
LINGER_KILLED_SECONDS: Final = 3.0
STOP_SECONDS: Final = 5
# Pods of so many attempts are kept for their logs.
ATTEMPTS_KEPT: Final = 3
PRUNED_MAX: Final = 500
"""Pods that one start deletes; the next forgets more."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Gang:
    attempt: int
    settled: bool = False  # no more pods are being made or bound
    failed: bool = False  # some could not be made: the engine knows, and will have the rest ended
    stopping: bool = False
    task: asyncio.Task[None] | None = None


class Gangs:
    """All gangs of one term."""

    def __init__(
        self,
        api: Api,
        world: World,
        gateway: Gateway,
        seams: Seams,
        *,
        lane: Lane,
        tell: Callable[[Event], None],
        state_of: Callable[[str], JobState | None],
        uid_of: Callable[[str], str | None],
        spawn: Callable[[Coroutine[Any, Any, None], str, str], asyncio.Task[None]],
        templates: Templates,
    ) -> None:
        self._api = api
        self._world = world
        self._gateway = gateway
        self._seams = seams
        self._tell = tell
        self._state_of = state_of
        self._uid_of = uid_of
        self._spawn = spawn
        self._templates = templates
        self._calls = PodCalls(api, world.pods, lane)
        self._gangs: dict[str, _Gang] = {}
        self._leaving: dict[str, PodView] = {}  # gone or ended, their account still awaited
        self._starts = Starts(api, gateway, tell=tell, state_of=state_of, pods_of=self._pods_of)
        self._concluded: set[str] = set()
        self._changes = Changes()  # of jobs' pods, and of jobs that are forgotten, by job
        self._strays: set[str] = set()  # being ended

    # -- what the engine says ------------------------------------------------------------------

    def start(self, job: FlyerJob, start: Start, found: dict[str, Any] | None = None) -> None:
        """Make the pods of an attempt; the gateway tells GangStarted.

        `found` is the object as it is stored where that is known; else it is read.
        """
        known = self._gangs.get(start.job)
        if known is not None and known.attempt == start.attempt:
            return
        gang = self._gangs[start.job] = _Gang(start.attempt)
        work = self._start(gang, job, start, found)
        gang.task = self._spawn(work, f"start {start.job}", start.job)

    def adopt(self, job: FlyerJob, start: Start) -> None:
        """A gang that runs already: its sidecars may come to us.

        One that this term knows has its streams reported again: the engine was rebuilt.
        """
        if self.knows(start.job):
            self._gateway.restate(start.job)
            return
        job = self._capped(job)
        self._gangs[start.job] = _Gang(start.attempt, settled=True)
        pods = [one for one in self._pods_of(start.job) if one.attempt == start.attempt]
        self._expect(job, start, [(one.rank, _identity(one)) for one in pods])

    def stop(self, stop: Stop) -> None:
        """End pods; `look` tells when they are gone."""
        gang = self._gangs.get(stop.job)
        if gang is not None and gang.attempt <= stop.attempt:
            gang.stopping = True
        self._spawn(self._stop(stop, gang), f"stop {stop.job}", stop.job)

    def forget(self, job: str) -> None:
        """The attempt is over and its nodes are empty."""
        self._changes.notify(job)
        gang = self._gangs.pop(job, None)
        if gang is not None:
            self._gateway.forget(job, gang.attempt)

    def _pods_of(self, job: str) -> list[PodView]:
        """The pods of the object that the engine knows under this name."""
        return self._world.pods_of(job, self._uid_of(job))

    def knows(self, job: str) -> bool:
        """Whether an attempt of the job is not forgotten yet."""
        return job in self._gangs

    # -- what the cluster says -----------------------------------------------------------------

    def pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        """A pod moved on."""
        pod = after or before
        assert pod is not None, "a change of nothing"
        self._changes.notify(pod.job)
        if after is not None:
            self.locate(after)
        if after is not None and after.deleting and not (before and before.deleting):
            self._evicted(after)
        if after is None or after.ended:
            self.conclude(pod, gone=after is None)
        elif before is None or before.node != after.node:
            self.look(pod.job)

    def locate(self, pod: PodView) -> None:
        """The gang's start may wait for the address. Repeating it is harmless."""
        if pod.ip:
            self._gateway.locate(pod.uid, pod.ip)

    def _evicted(self, pod: PodView) -> None:
        """`kubectl drain` or a person deletes a pod: the gang saves, leaves and queues again."""
        state, view = self._state_of(pod.job), self._world.job(pod.job)
        if view is None or view.deleting or view.uid != pod.owner:
            return  # the pod goes with its job
        if pod.ended or state is None or state.status.phase is not Phase.RUNNING:
            return
        if pod.attempt == state.status.chain.attempt:
            why = f"pod {pod.name} on node {pod.node} is being deleted, as when a node is drained"
            self._tell(RequeueRequested(pod.job, pod.attempt, by="kubernetes", reason=why))

    def conclude(self, pod: PodView, *, gone: bool = False) -> None:
        """A pod ended or is gone: get its account, then see whether its node is empty."""
        if pod.uid in self._concluded or pod.uid in self._leaving:
            if gone:
                self._concluded.discard(pod.uid)
            return
        self._leaving[pod.uid] = pod
        self._starts.failed(pod)
        self._spawn(self._conclude(pod), f"conclude {pod.name}", pod.job)

    async def _conclude(self, pod: PodView) -> None:
        if not pod.ended and not pod.deleting:
            await self._calls.ended(pod)  # until then its node is not empty
        outcome = pod.outcome if pod.outcome is not None else self._seams.outcome_of(None)
        await self._gateway.conclude(pod.uid, outcome)
        del self._leaving[pod.uid]
        if any(one.uid == pod.uid for one in self._pods_of(pod.job)):
            self._concluded.add(pod.uid)
        self.look(pod.job)

    def look(self, job: str) -> None:
        """Tell NodeEmptied for every node that the job's status says is occupied, and no pod."""
        state = self._state_of(job)
        if state is None or not state.status.occupied:
            return
        attempt = state.status.chain.attempt
        made = self._all_made(self._gangs.get(job), attempt, state)
        occupied = [one for one in state.status.occupied if made or one.attempt != attempt]
        if not occupied:
            return
        # The earliest attempt that has a living pod on each node; "": one that is on none yet.
        first: dict[str, int] = {}
        pods = [one for one in self._pods_of(job) if not one.ended]
        for pod in (*pods, *(one for one in self._leaving.values() if one.job == job)):
            first[pod.node] = min(pod.attempt, first.get(pod.node, pod.attempt))
        for one in occupied:
            held = [first[name] for name in ("", one.name) if name in first]
            if not held or min(held) > one.attempt:
                self._tell(NodeEmptied(one.name, job, one.attempt))

    def _all_made(self, gang: _Gang | None, attempt: int, state: JobState) -> bool:
        """Whether a missing pod is one that is gone, not one that is still to come."""
        if gang is None or gang.attempt != attempt:
            return state.status.phase is not Phase.STARTING
        return gang.settled and (gang.stopping or not gang.failed)

    # -- making pods ---------------------------------------------------------------------------

    async def _start(
        self, gang: _Gang, job: FlyerJob, start: Start, found: dict[str, Any] | None
    ) -> None:
        try:
            found = await self._read(job) if found is None else found
            whole = _with_template(job, found["spec"]["template"])
            names = frozenset(start.assignment.names)
            await self._templates.require(whole, mark_of(found), names)
            await self._make(gang, self._capped(whole), start)
        except LeadershipLostError:
            raise
        except (PodsRefusedError, InvalidError, ValidationError) as error:
            # What the manifest asks for will not come to be.
            self._not_started(gang, start, Failed(EXIT_NOT_STARTED, str(error)[:1000]))
        except (ApiError, UnfitNowError) as error:
            # A quota or a node may have room later, who forbids it may allow it, and an API server
            # that was away is no fault of the job: this costs no restart.
            log.warning("%s: attempt %d may not start: %s", start.job, start.attempt, error)
            gang.failed = True
            self._tell(StartRefused(start.job, start.attempt, str(error)[:1000]))
        finally:
            gang.settled = True
        self.look(start.job)

    def _capped(self, job: FlyerJob) -> FlyerJob:
        """With the graces that the engine grants: pods and sidecars are given no longer ones."""
        held = self._state_of(job.key)
        priority = held.status.priority if held is not None else None
        terms = self._world.zones().limits.terms(job.spec, priority or job.spec.priority)
        asked = job.spec.preemption
        granted = asked.replace(
            grace=Duration.of_seconds(terms.grace), max_grace=Duration.of_seconds(terms.max_grace)
        )
        return job.replace(spec=job.spec.replace(preemption=granted))

    def _not_started(self, gang: _Gang, start: Start, outcome: Failed) -> None:
        log.warning("%s: attempt %d does not start: %s", start.job, start.attempt, outcome.reason)
        gang.failed = True
        for name in start.assignment.names:
            self._tell(PodExited(start.job, start.attempt, name, outcome))

    async def _make(self, gang: _Gang, job: FlyerJob, start: Start) -> None:
        names = start.assignment.names
        manifests = self._build(job, start)
        made = await _all([
            self._calls.create(job, one, name) for one, name in zip(manifests, names, strict=True)
        ])  # fmt: skip
        if gang.stopping:
            return
        identities = [
            (
                rank,
                PodIdentity(
                    job.metadata.namespace, one["metadata"]["name"], one["metadata"]["uid"]
                ),
            )
            for rank, one in enumerate(made)
        ]
        self._expect(job, start, identities)
        for one in made:
            address = (one.get("status") or {}).get("podIP")
            if address:
                self._gateway.locate(one["metadata"]["uid"], address)
        await _all(
            [self._calls.place(one, name) for one, name in zip(made, names, strict=True)],
        )
        watch = self._starts.watch(start, manifests[0]["spec"])
        self._spawn(watch, f"start of {start.job}", start.job)
        old = [
            one for one in self._pods_of(start.job)
            if one.ended and one.attempt <= start.attempt - ATTEMPTS_KEPT
        ]  # fmt: skip
        for pod in sorted(old, key=lambda one: one.attempt)[:PRUNED_MAX]:
            await self._calls.delete(pod.namespace, pod.name, pod.uid, 0)

    def _build(self, job: FlyerJob, start: Start) -> list[dict[str, Any]]:
        """The pods' manifests. Whatever goes wrong is the template's: nothing else goes in."""
        try:
            return self._seams.build_pods(job, start, self._placed(start.assignment.names))
        except PodsRefusedError:
            raise
        except Exception as error:
            log.exception("%s: a bug, please report it", job.key)
            why = f"spec.template: no pods can be made of it ({type(error).__name__}: {error})"
            raise PodsRefusedError(job.key, [why]) from error

    async def _read(self, job: FlyerJob) -> dict[str, Any]:
        """The object with its pod template, which views leave out."""
        found = await self._api.get(FLYERJOBS, job.metadata.name, job.metadata.namespace)
        metadata = found["metadata"]
        if metadata.get("uid") != job.metadata.uid:
            raise NotFoundError(f"get flyerjobs {job.key}", "it was deleted meanwhile")
        return found

    def _placed(self, names: Sequence[str]) -> dict[str, PlacedNode]:
        placed = {}
        for name in names:
            view = self._world.nodes.get("", name)
            placed[name] = PlacedNode(
                name=name,
                dedicated=view.dedicated if view else True,
                allocatable=view.allocatable if view else {},
            )
        return placed

    def _expect(self, job: FlyerJob, start: Start, pods: Sequence[tuple[int, PodIdentity]]) -> None:
        ordered = [identity for _, identity in sorted(pods, key=lambda one: one[0])]
        self._gateway.expect(job, start, ordered)

    # -- ending pods ---------------------------------------------------------------------------

    async def _stop(self, stop: Stop, gang: _Gang | None) -> None:
        if gang is not None and gang.stopping and gang.task is not None:
            await asyncio.wait([gang.task])  # its calls have deadlines
        state, kill_seconds = self._state_of(stop.job), LINGER_SECONDS
        if _ends_by_itself(state):
            over = state is not None and state.ended
            await self._linger(stop, LINGER_SECONDS if over else LINGER_RELEASED_SECONDS)
            kill_seconds = LINGER_KILLED_SECONDS
        told = self._gateway.kill(stop.job, stop.attempt)
        await self._delete([one for one in self._living(stop) if one.uid not in told], stop)
        if told:
            await self._linger(stop, kill_seconds)
            await self._delete(self._living(stop), stop)
        self.look(stop.job)

    async def _delete(self, pods: Sequence[PodView], stop: Stop) -> None:
        grace_seconds = KILL_SECONDS if stop.kill else STOP_SECONDS
        await _all([
            self._calls.delete(one.namespace, one.name, one.uid, grace_seconds if one.node else 0)
            for one in pods
        ])  # fmt: skip

    def _living(self, stop: Stop) -> list[PodView]:
        nodes = frozenset(stop.nodes)  # Asked often, of thousands.
        return [
            one
            for one in self._pods_of(stop.job)
            if one.attempt <= stop.attempt and not one.ended and (not one.node or one.node in nodes)
        ]

    async def _linger(self, stop: Stop, seconds: float) -> None:
        """Until they have ended, at most so long."""
        await self._changes.until(stop.job, lambda: not self._living(stop), seconds)

    def stray(self, pod: PodView) -> None:
        """A living pod of ours of no job, or where no job's status has it: end it."""
        if not pod.deleting and pod.uid not in self._strays:
            self._strays.add(pod.uid)
            self._spawn(self._end_stray(pod), f"stray {pod.name}", pod.job)

    async def _end_stray(self, pod: PodView) -> None:
        """Unless its job says otherwise: what is cached of it may be old."""
        try:
            if await self._calls.wanted(pod):
                return
            log.warning(
                "%s/%s on %s is ended: no job's status has it there",
                pod.namespace, pod.name, pod.node,
            )  # fmt: skip
            await self._calls.delete(pod.namespace, pod.name, pod.uid, KILL_SECONDS)
        finally:
            self._strays.discard(pod.uid)


def _with_template(job: FlyerJob, template: dict[str, Any]) -> FlyerJob:
    found = PodTemplate.model_validate(template)
    return job.replace(spec=job.spec.replace(template=found))


def _ends_by_itself(state: JobState | None) -> bool:
    """It has saved and leaves, or it is over: the rest of its ranks have little left to do."""
    if state is None or state.removed:
        return False
    return state.ended or state.status.suspend_code is SuspendCode.MAY_SUSPEND


def _identity(pod: PodView) -> PodIdentity:
    return PodIdentity(pod.namespace, pod.name, pod.uid, pod.ip)


async def _all(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in order. After a failure too every call has ended before it is raised."""
    results = await asyncio.gather(*work, return_exceptions=True)
    failures = [one for one in results if isinstance(one, BaseException)]
    for failure in sorted(failures, key=lambda one: not isinstance(one, LeadershipLostError)):
        raise failure
    return results

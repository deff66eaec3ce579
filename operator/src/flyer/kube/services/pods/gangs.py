"""Gangs of pods: create and bind all pods of an attempt, delete them, and detect empty nodes.

Every call is idempotent: an existing pod is used, a bound one left. Whether a node is empty follows
from the observed pods, not from past calls (`report_empty_nodes`): a node of a gang is empty when
it has no pod of this or an earlier attempt of the job in a phase in which a process may live, and
no pods are being created.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flyer.api import Duration, Phase, PodTemplate, SuspendCode
from flyer.engine import Failed, NodeEmptied, PodExited, RequeueRequested, Start, StartRefused
from flyer.kube.apiserver.election import LeadershipLostError
from flyer.kube.apiserver.errors import ApiError, ForbiddenError, InvalidError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS
from flyer.kube.cache.job_view import mark_of
from flyer.kube.gateway.identities import PodIdentity
from flyer.kube.keyed_condition import KeyedCondition
from flyer.kube.pods import PodsRefusedError
from flyer.kube.services.pods.pod_control import KILL_SECONDS
from flyer.kube.services.pods.start_monitor import StartMonitor
from flyer.kube.services.pods.templates import NodesUnfitError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Event, JobState, Outcome, Stop
    from flyer.kube.apiserver import Api
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.pod_view import PodView
    from flyer.kube.services.dependencies import Gateway
    from flyer.kube.services.pods.pod_control import PodControl
    from flyer.kube.services.pods.templates import PodTemplates

__all__ = ["Gangs"]

# BSD's EX_CANTCREAT, as in the local driver: the pods cannot be created.
EXIT_NOT_STARTED: Final = 73
# A pod that exits by itself keeps its logs, which a deleted one loses: pods of a finished or
# released job exit, and so do pods whose launchers are ordered to kill their ranks. A kubelet
# reports the exit seconds later. Less than the engine's stop deadline.
LINGER_SECONDS: Final = 8.0
# Other jobs wait for released nodes, and ranks may ignore SIGTERM.
LINGER_RELEASED_SECONDS: Final = 0.5  # after the hold time of the event queue, four seconds
# After the grace period, for ranks killed by their launchers: a second until SIGKILL, and the
# kubelet's report.
LINGER_KILLED_SECONDS: Final = 3.0
STOP_SECONDS: Final = 5
# Number of attempts whose pods are kept for their logs.
ATTEMPTS_KEPT: Final = 3
PRUNED_MAX: Final = 500
"""Old pods deleted per start; later starts delete the rest."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Gang:
    attempt: int
    uid: str  # of the job: a later object with its name has other gangs
    settled: bool = False  # no pods are being created or bound
    failed: bool = (
        False  # some pods could not be created: reported to the engine, which stops the rest
    )
    stopping: bool = False
    task: asyncio.Task[None] | None = None


class Gangs:
    """The gangs of one term."""

    def __init__(
        self,
        api: Api,
        cache: ClusterCache,
        gateway: Gateway,
        pod_control: PodControl,
        templates: PodTemplates,
        *,
        outcome_of: Callable[[Mapping[str, Any] | None], Outcome],
        enqueue: Callable[[Event], None],
        state_of: Callable[[str], JobState | None],
        uid_of: Callable[[str], str | None],
        spawn: Callable[[Coroutine[Any, Any, None], str, str], asyncio.Task[None]],
    ) -> None:
        self._api = api
        self._cache = cache
        self._gateway = gateway
        self._pod_control = pod_control
        self._templates = templates
        self._outcome_of = outcome_of
        self._enqueue = enqueue
        self._state_of = state_of
        self._uid_of = uid_of
        self._spawn = spawn
        self._gangs: dict[str, _Gang] = {}
        self._leaving: dict[
            str, PodView
        ] = {}  # deleted or terminated, with their sidecar's report still awaited
        self._start_monitor = StartMonitor(
            api, gateway, enqueue=enqueue, state_of=state_of, pods_of=self._pods_of
        )
        self._concluded: set[str] = set()
        self._changes = KeyedCondition()  # notified of changed pods and forgotten jobs, by job

    # -- engine actions ------------------------------------------------------------------------

    def start(self, job: FlyerJob, start: Start, stored: dict[str, Any] | None = None) -> None:
        """Create the pods of an attempt; the gateway reports GangStarted.

        `stored` is the stored object if known; otherwise it is read.
        """
        current = self._gangs.get(start.job)
        if current is not None and (current.attempt, current.uid) == (start.attempt, start.uid):
            return
        if current is not None and current.uid != start.uid:
            self._abandon(start.job)
        gang = self._gangs[start.job] = _Gang(start.attempt, start.uid)
        work = self._start(gang, job, start, stored)
        gang.task = self._spawn(work, f"start {start.job}", start.job)

    def adopt(self, job: FlyerJob, start: Start) -> None:
        """Accept the sidecars of a gang that already runs.

        The streams of a gang that this term knows are reported again, after a rebuild.
        """
        current = self._gangs.get(start.job)
        if current is not None and current.uid == start.uid:
            self._gateway.republish_streams(start.job)
            return
        job = self._capped(job)
        self._gangs[start.job] = _Gang(start.attempt, start.uid, settled=True)
        pods = [pod for pod in self._pods_of(start.job) if pod.attempt == start.attempt]
        self._expect(job, start, [(pod.rank, _identity(pod)) for pod in pods])

    def stop(self, stop: Stop) -> None:
        """Stop pods; `report_empty_nodes` reports their deletion."""
        gang = self._gangs.get(stop.job)
        if gang is not None and gang.uid != stop.uid:
            gang = None
        if gang is not None and gang.attempt <= stop.attempt:
            gang.stopping = True
        self._spawn(self._stop(stop, gang), f"stop {stop.job}", stop.job)

    def forget(self, job: str, uid: str) -> None:
        """The attempt is over and its nodes are empty. `uid`: of the job."""
        self._changes.notify(job)
        gang = self._gangs.get(job)
        if gang is not None and gang.uid == uid:
            del self._gangs[job]
            self._gateway.forget(job, gang.attempt, uid)

    def forget_all_but(self, uids: Mapping[str, str]) -> None:
        """Forget the gangs of other jobs, which have ended or vanished. `uids`: jobs, by key.

        Their remaining pods are orphans.
        """
        for job in [job for job, gang in self._gangs.items() if uids.get(job) != gang.uid]:
            self._abandon(job)

    def _abandon(self, job: str) -> None:
        """Forget a gang whose job is gone, and create and bind no more pods of it."""
        gang = self._gangs[job]
        gang.stopping = True
        if gang.task is not None:
            gang.task.cancel()
        self.forget(job, gang.uid)

    def forget_if_over(self, job: str) -> None:
        """Forget the gang of a job that waits and occupies no node."""
        state = self._state_of(job)
        waits = state is not None and state.status.phase.idle
        if waits and state is not None and not state.status.occupied:
            self.forget(job, state.uid)

    def _pods_of(self, job: str) -> list[PodView]:
        """The pods of the object that the engine has under this key."""
        return self._cache.pods_of(job, self._uid_of(job))

    # -- pod changes ---------------------------------------------------------------------------

    def pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        """A pod was added, changed or deleted."""
        pod = after or before
        assert pod is not None, "a change without an object"
        self._changes.notify(pod.job)
        if after is not None:
            self.locate(after)
        if after is not None and after.deleting and not (before and before.deleting):
            self._evicted(after)
        if after is None or after.ended:
            self.conclude(pod, deleted=after is None)
        elif before is None or before.node != after.node:
            self.report_empty_nodes(pod.job)

    def release(self, uid: str) -> None:
        """A pod of a job that the engine has forgotten was deleted."""
        self._concluded.discard(uid)

    def locate(self, pod: PodView) -> None:
        """Report the pod's address, which the gang's start may wait for. Idempotent."""
        if pod.ip:
            self._gateway.locate(pod.uid, pod.ip)

    def _evicted(self, pod: PodView) -> None:
        """A pod is deleted, as by `kubectl drain`: the gang checkpoints and is requeued."""
        state, view = self._state_of(pod.job), self._cache.job(pod.job)
        if view is None or view.deleting or view.uid != pod.owner:
            return  # the pod is deleted with its job
        if pod.ended or state is None or state.status.phase is not Phase.RUNNING:
            return
        if pod.attempt == state.status.history.attempt:
            why = f"pod {pod.name} on node {pod.node} is being deleted, as when a node is drained"
            self._enqueue(
                RequeueRequested(pod.job, pod.attempt, by="kubernetes", reason=why, uid=pod.owner)
            )

    def conclude(self, pod: PodView, *, deleted: bool = False) -> None:
        """A pod terminated or was deleted: collect its outcome, then check its node."""
        if pod.uid in self._concluded or pod.uid in self._leaving:
            if deleted:
                self._concluded.discard(pod.uid)
            return
        self._leaving[pod.uid] = pod
        self._start_monitor.failed(pod)
        self._spawn(self._conclude(pod), f"conclude {pod.name}", pod.job)

    async def _conclude(self, pod: PodView) -> None:
        if not pod.ended and not pod.deleting:
            await self._pod_control.wait_ended(pod)  # its node is not empty before
        outcome = pod.outcome if pod.outcome is not None else self._outcome_of(None)
        await self._gateway.conclude(pod.uid, outcome)
        del self._leaving[pod.uid]
        if any(other.uid == pod.uid for other in self._cache.pods_of(pod.job, pod.owner)):
            self._concluded.add(pod.uid)
        self.report_empty_nodes(pod.job)

    def report_empty_nodes(self, job: str) -> None:
        """Report NodeEmptied for every occupied node of the job's status that has no live pod."""
        state = self._state_of(job)
        if state is None or not state.status.occupied:
            return
        attempt = state.status.history.attempt
        all_created = self._all_made(attempt, state)
        occupied = [
            node for node in state.status.occupied if all_created or node.attempt != attempt
        ]
        if not occupied:
            return
        # The earliest attempt with a live pod, by node; "": not bound yet.
        first: dict[str, int] = {}
        pods = [pod for pod in self._pods_of(job) if not pod.ended]
        leaving = [pod for pod in self._leaving.values() if pod.owner == state.uid]
        for pod in (*pods, *leaving):
            first[pod.node] = min(pod.attempt, first.get(pod.node, pod.attempt))
        for node in occupied:
            attempts = [first[name] for name in ("", node.name) if name in first]
            if not attempts or min(attempts) > node.attempt:
                self._enqueue(NodeEmptied(node.name, job, node.attempt, uid=state.uid))

    def _all_made(self, attempt: int, state: JobState) -> bool:
        """Whether all pods have been created, so that a missing pod was deleted."""
        gang = self._gangs.get(state.key)
        if gang is None or (gang.attempt, gang.uid) != (attempt, state.uid):
            return state.status.phase is not Phase.STARTING
        return gang.settled and (gang.stopping or not gang.failed)

    # -- creation ------------------------------------------------------------------------------

    async def _start(
        self, gang: _Gang, job: FlyerJob, start: Start, stored: dict[str, Any] | None
    ) -> None:
        try:
            stored = await self._read(job) if stored is None else stored
            whole = _with_template(job, stored["spec"]["template"])
            names = frozenset(start.assignment.names)
            await self._templates.require(whole, mark_of(stored), names)
            await self._make(gang, self._capped(whole), start)
        except LeadershipLostError:
            raise
        except (PodsRefusedError, InvalidError, ValidationError) as error:
            # A permanent fault of the manifest.
            self._not_started(gang, start, Failed(EXIT_NOT_STARTED, str(error)[:1000]))
        except (ApiError, NodesUnfitError) as error:
            # Temporary: a full quota or node, a policy, or an unavailable API server. It is not a
            # fault of the job and costs no restart.
            log.warning("%s: attempt %d cannot start now: %s", start.job, start.attempt, error)
            gang.failed = True
            why = str(error)[:1000]
            transient = not (isinstance(error, ForbiddenError) and error.lasting)
            self._enqueue(StartRefused(start.job, start.attempt, why, transient, uid=start.uid))
        finally:
            gang.settled = True
        self.report_empty_nodes(start.job)

    def _capped(self, job: FlyerJob) -> FlyerJob:
        """The job with the grace periods that the engine grants, for its pods and sidecars."""
        job_state = self._state_of(job.key)
        priority = job_state.status.priority if job_state is not None else None
        terms = self._cache.zones().limits.terms(job.spec, priority or job.spec.priority)
        preemption = job.spec.preemption
        granted = preemption.replace(
            checkpoint_grace_period=Duration.of_seconds(terms.checkpoint_grace_period),
            max_checkpoint_grace_period=Duration.of_seconds(terms.max_checkpoint_grace_period),
        )
        return job.replace(spec=job.spec.replace(preemption=granted))

    def _not_started(self, gang: _Gang, start: Start, outcome: Failed) -> None:
        log.warning("%s: attempt %d cannot start: %s", start.job, start.attempt, outcome.reason)
        gang.failed = True
        for name in start.assignment.names:
            self._enqueue(PodExited(start.job, start.attempt, name, outcome, uid=start.uid))

    async def _make(self, gang: _Gang, job: FlyerJob, start: Start) -> None:
        names = start.assignment.names
        manifests = self._templates.build(job, start)
        created = await _all([
            self._pod_control.create(job, manifest, name)
            for manifest, name in zip(manifests, names, strict=True)
        ])  # fmt: skip
        if gang.stopping:
            return
        identities = [
            (
                rank,
                PodIdentity(
                    job.metadata.namespace,
                    pod_object["metadata"]["name"],
                    pod_object["metadata"]["uid"],
                ),
            )
            for rank, pod_object in enumerate(created)
        ]
        self._expect(job, start, identities)
        for pod in created:
            address = (pod.get("status") or {}).get("podIP")
            if address:
                self._gateway.locate(pod["metadata"]["uid"], address)
        await _all(
            [
                self._pod_control.bind(pod_object, name)
                for pod_object, name in zip(created, names, strict=True)
            ],
        )
        watch = self._start_monitor.watch(start, manifests[0]["spec"])
        self._spawn(watch, f"start of {start.job}", start.job)
        old = [
            pod for pod in self._cache.pods_of(start.job, start.uid)
            if pod.ended and pod.attempt <= start.attempt - ATTEMPTS_KEPT
        ]  # fmt: skip
        for pod in sorted(old, key=lambda pod: pod.attempt)[:PRUNED_MAX]:
            await self._pod_control.delete(pod.namespace, pod.name, pod.uid, 0)

    async def _read(self, job: FlyerJob) -> dict[str, Any]:
        """Read the object with its pod template, which views omit."""
        document = await self._api.get(FLYERJOBS, job.metadata.name, job.metadata.namespace)
        metadata = document["metadata"]
        if metadata.get("uid") != job.metadata.uid:
            raise NotFoundError(f"get flyerjobs {job.key}", "the job was deleted")
        return document

    def _expect(self, job: FlyerJob, start: Start, pods: Sequence[tuple[int, PodIdentity]]) -> None:
        ordered = [identity for _, identity in sorted(pods, key=lambda item: item[0])]
        self._gateway.expect(job, start, ordered)

    # -- deletion ------------------------------------------------------------------------------

    async def _stop(self, stop: Stop, gang: _Gang | None) -> None:
        if gang is not None and gang.stopping and gang.task is not None:
            await asyncio.wait([gang.task])  # bounded: its calls have deadlines
        state, kill_seconds = self._state_of(stop.job), LINGER_SECONDS
        if state is not None and state.uid == stop.uid and _ends_by_itself(state):
            seconds = LINGER_SECONDS if state.ended else LINGER_RELEASED_SECONDS
            await self._linger(stop, seconds)
            kill_seconds = LINGER_KILLED_SECONDS
        self_ending = self._gateway.kill(stop.job, stop.attempt, stop.uid)
        await self._delete([pod for pod in self._living(stop) if pod.uid not in self_ending], stop)
        if self_ending:
            await self._linger(stop, kill_seconds)
            await self._delete(self._living(stop), stop)
        self.report_empty_nodes(stop.job)

    async def _delete(self, pods: Sequence[PodView], stop: Stop) -> None:
        # Never 0: a pod may be bound though that is not observed, and would disappear before its
        # processes end. The API server deletes unbound pods immediately.
        grace_seconds = KILL_SECONDS if stop.kill else STOP_SECONDS
        await _all([
            self._pod_control.delete(pod.namespace, pod.name, pod.uid, grace_seconds)
            for pod in pods
        ])  # fmt: skip

    def _living(self, stop: Stop) -> list[PodView]:
        nodes = frozenset(stop.nodes)  # called often, for thousands of pods
        return [
            pod
            for pod in self._cache.pods_of(stop.job, stop.uid)
            if pod.attempt <= stop.attempt and not pod.ended and (not pod.node or pod.node in nodes)
        ]

    async def _linger(self, stop: Stop, seconds: float) -> None:
        """Wait until the pods have terminated, for at most `seconds`."""
        await self._changes.until(stop.job, lambda: not self._living(stop), seconds)


def _with_template(job: FlyerJob, template: dict[str, Any]) -> FlyerJob:
    validated = PodTemplate.model_validate(template)
    return job.replace(spec=job.spec.replace(template=validated))


def _ends_by_itself(state: JobState) -> bool:
    """Whether the job has checkpointed or is over, so that its remaining ranks exit soon."""
    if state.removed:
        return False
    return state.ended or state.status.suspend_code is SuspendCode.MAY_SUSPEND


def _identity(pod: PodView) -> PodIdentity:
    return PodIdentity(pod.namespace, pod.name, pod.uid, pod.ip)


async def _all(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in order. A failure is raised once all calls have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in sorted(
        failures, key=lambda failure: not isinstance(failure, LeadershipLostError)
    ):
        raise failure
    return results

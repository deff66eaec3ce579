"""Controller of ThreeFSClusters: observes each one every few seconds and performs its next step.

It runs while the operator leads, on the operator's fenced connection. Each cluster has its own
task, so that one that does not answer delays no other. StatefulSets are written by
compare-and-swap, and pods evicted with the precondition of their uid: a step that was planned from
an older state fails and is planned again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flyer.api import API_VERSION, ThreeFSCluster, ThreeFSClusterStatus
from flyer.api.names import KIND_THREEFS
from flyer.kube.apiserver.election import LeadershipLostError
from flyer.kube.apiserver.errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OverloadedError,
)
from flyer.kube.apiserver.resources import JOBS, PODS, THREEFSCLUSTERS
from flyer.kube.threefs.health import read_health
from flyer.kube.threefs.jobs import drain_job
from flyer.kube.threefs.observer import ClusterObserver
from flyer.kube.threefs.plan import plan, refused
from flyer.kube.threefs.report import refused_status, rejected_status, status_of
from flyer.kube.threefs.reservations import reservations_of
from flyer.kube.threefs.writer import ConflictingObjectError, Writer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from flyer.kube.apiserver import Api
    from flyer.kube.threefs.health import Health
    from flyer.kube.threefs.resize import Resize
    from flyer.kube.threefs.rollout import Restart
    from flyer.kube.threefs.settings import ClusterSettings

__all__ = ["ThreeFSClusters"]

INTERVAL_SECONDS: Final = 5.0
STEP_SECONDS: Final = 120.0
"""Maximum time of one step of one cluster."""
RESERVE_SECONDS: Final = 10.0
CONCURRENT_MAX: Final = 8

log = logging.getLogger(__name__)
Object = dict[str, Any]


class ThreeFSClusters:
    """The controller of one term; `health_of` reads the health from addresses of exporters."""

    def __init__(
        self,
        api: Api,
        settings: ClusterSettings,
        health_of: Callable[[Sequence[str]], Awaitable[Health | None]] | None = None,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._api = api
        self._health_of = health_of or partial(read_health, port=settings.metrics_port)
        self._interval_seconds = interval_seconds
        self._writer = Writer(api, settings)
        self._observers: dict[str, ClusterObserver] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._reserving = asyncio.Semaphore(CONCURRENT_MAX)
        self._tries: dict[str, int] = {}
        """How often the reservation of a cluster was tried; those with fewer tries come first."""

    async def run(self) -> None:
        """Run until cancelled, or until leadership is lost."""
        steps: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    values = await self._api.list(THREEFSCLUSTERS)
                except LeadershipLostError:
                    raise
                except ApiError as error:
                    log.warning("cannot list ThreeFSClusters, retrying: %s", error)
                else:
                    steps = {uid: step for uid, step in steps.items() if not step.done()}
                    await self._start(group, steps, values)
                await asyncio.sleep(self._interval_seconds)

    async def _start(
        self, group: asyncio.TaskGroup, steps: dict[str, asyncio.Task[None]], values: list[Object]
    ) -> None:
        """Start a step of each cluster that has none in progress."""
        parsed = {value["metadata"]["uid"]: _parsed(value) for value in values}
        self._observers = {
            uid: self._observers.get(uid) or ClusterObserver(self._api, self._health_of)
            for uid in parsed
        }
        self._writer.forget_all_but(parsed.keys())
        reservations = reservations_of(values, parsed)
        reserve = []
        for value in values:
            uid = value["metadata"]["uid"]
            if uid in steps or "deletionTimestamp" in value["metadata"]:
                continue
            if uid in reservations.missing:
                reserve.append(value)
                continue
            work = self._guarded(value, parsed[uid], reservations.refused.get(uid, ""))
            steps[uid] = group.create_task(work, name=f"threefs {uid}")
        await self._reserve_all(reserve, reservations.missing)

    async def _reserve_all(self, values: list[Object], missing: dict[str, tuple[str, ...]]) -> None:
        """Store reservations before the next list, from which the clusters' next steps start.

        It takes at most `RESERVE_SECONDS`, during which no other step starts.
        """
        uids = {value["metadata"]["uid"] for value in values}
        self._tries = {uid: self._tries.get(uid, 0) for uid in uids}
        values.sort(key=lambda value: self._tries[value["metadata"]["uid"]])
        stores = (self._reserve(value, missing[value["metadata"]["uid"]]) for value in values)
        for result in await asyncio.gather(*stores, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _reserve(self, value: Object, locations: tuple[str, ...]) -> None:
        name = f"{value['metadata']['namespace']}/{value['metadata']['name']}"
        try:
            async with asyncio.timeout(RESERVE_SECONDS), self._reserving:
                self._tries[value["metadata"]["uid"]] += 1
                await self._store(value, _status_of(value).replace(reserved=locations))
        except LeadershipLostError:
            raise
        except (ApiError, TimeoutError) as error:
            log.warning("ThreeFSCluster %s: retrying its reservation: %r", name, error)
        except Exception:  # must not end the other clusters, nor the term
            log.exception("ThreeFSCluster %s: a bug, please report it", name)

    async def _guarded(self, value: Object, cluster: ThreeFSCluster | str, rival: str) -> None:
        name = f"{value['metadata']['namespace']}/{value['metadata']['name']}"
        try:
            async with self._slots, asyncio.timeout(STEP_SECONDS):
                await self._step(value, cluster, rival)
        except LeadershipLostError:
            raise
        except ConflictError as error:
            log.info("ThreeFSCluster %s: planned from an older state: %s", name, error)
        except TimeoutError:
            log.warning("ThreeFSCluster %s: a step took more than %g s", name, STEP_SECONDS)
        except ApiError as error:
            log.warning("ThreeFSCluster %s: retrying: %s", name, error)
        except Exception:  # must not end the other clusters, nor the term
            log.exception("ThreeFSCluster %s: a bug, please report it", name)

    async def _step(self, value: Object, cluster: ThreeFSCluster | str, rival: str) -> None:
        if isinstance(cluster, str):
            await self._refuse(value, "Invalid", cluster)
            return
        if rival:
            await self._refuse(value, "Conflict", rival)
            return
        try:
            status = await self._reconcile(cluster)
        except ConflictingObjectError as error:
            await self._refuse(value, "Conflict", str(error))
        except (InvalidError, ForbiddenError) as error:
            await self._reject(value, cluster, str(error))
        else:
            await self._store(value, status)

    async def _reconcile(self, cluster: ThreeFSCluster) -> ThreeFSClusterStatus:
        observer = self._observers[str(cluster.metadata.uid)]
        await self._writer.write_small_objects(cluster)
        sets = await observer.stateful_sets(cluster.metadata.namespace)
        self._writer.check(cluster, sets)
        observed = await observer.observe(cluster, sets)
        step = plan(cluster, observed)
        if changes := await self._writer.write_sets(cluster, sets, step.replicas, observed.health):
            # Pods and revisions are older than these StatefulSets: nothing else is done.
            observed = observed.after_writing(changes)
            return status_of(cluster, observed, plan(cluster, observed))
        await self._resize(cluster, step.resize)
        if why := await self._restart(cluster.metadata.namespace, step.restart):
            step = refused(step, why)
        return status_of(cluster, observed, step)

    async def _restart(self, namespace: str, restart: Restart | None) -> str:
        """Evict a pod. Returns why a disruption budget or a webhook refused it; empty: none did."""
        if restart is None:
            return ""
        pod = restart.pod
        log.info("evicting pod %s/%s: %s", namespace, pod.name, restart.reason)
        eviction = {
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }  # fmt: skip
        try:
            # Not a deletion: disruption budgets apply, also those of administrators.
            await self._api.post(PODS, pod.name, namespace, "eviction", eviction)
        except NotFoundError:
            log.info("pod %s/%s is deleted already", namespace, pod.name)
        except (ForbiddenError, InvalidError, OverloadedError) as error:
            log.warning("pod %s/%s was not evicted: %s", namespace, pod.name, error)
            return str(error)
        return ""

    async def _resize(self, cluster: ThreeFSCluster, size: Resize) -> None:
        namespace = cluster.metadata.namespace
        if size.suspend:
            await self._api.merge(JOBS, size.suspend, {"spec": {"suspend": True}}, namespace)
        for name in size.remove:
            try:
                await self._api.delete(JOBS, name, namespace, propagation="Background")
            except NotFoundError:
                log.info("job %s/%s is deleted already", namespace, name)
        for nodes, cancel in ((size.drain, False), (size.keep, True)):
            if nodes:
                job = drain_job(cluster, nodes, cancel=cancel)
                log.info("job %s/%s: %s", namespace, job["metadata"]["name"], size.note)
                try:
                    await self._api.create(JOBS, job, namespace)
                except AlreadyExistsError:
                    log.info("job %s/%s exists", namespace, job["metadata"]["name"])

    async def _reject(self, value: Object, cluster: ThreeFSCluster, message: str) -> None:
        """Report why the API server rejects the specification, and the services as they run."""
        observer = self._observers[str(cluster.metadata.uid)]
        try:
            sets = await observer.stateful_sets(cluster.metadata.namespace)
            observed = await observer.observe(cluster, sets)
        except ForbiddenError:  # the rejected request may have been one of these
            await self._refuse(value, "Rejected", message)
        else:
            await self._store(value, rejected_status(cluster, observed, message))

    async def _refuse(self, value: Object, reason: str, message: str) -> None:
        before, generation = _status_of(value), value["metadata"].get("generation")
        await self._store(value, refused_status(generation, before, reason, message, time.time()))

    async def _store(self, value: Object, status: ThreeFSClusterStatus) -> None:
        """Write the status if it has changed."""
        content = status.to_object()
        if content == value.get("status"):
            return
        changed = {**value, "apiVersion": API_VERSION, "kind": KIND_THREEFS, "status": content}
        await self._api.replace(THREEFSCLUSTERS, changed, "status")


def _parsed(value: Object) -> ThreeFSCluster | str:
    """The cluster, or why it is invalid."""
    metadata = {name: part for name, part in value["metadata"].items() if name != "managedFields"}
    content: Object = {
        "apiVersion": API_VERSION, "kind": KIND_THREEFS, "metadata": metadata,
        "spec": value.get("spec"), "status": _status_of(value),
    }  # fmt: skip
    try:
        return ThreeFSCluster.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def _status_of(value: Object) -> ThreeFSClusterStatus:
    """The stored status, without fields that only another release can read."""
    stored = value.get("status") or {}
    try:
        return ThreeFSClusterStatus.model_validate(stored)
    except ValidationError as error:
        foreign = {each["loc"][0] for each in error.errors(include_url=False)}
        known = {key: part for key, part in stored.items() if key not in foreign}
        return ThreeFSClusterStatus.model_validate(known)

"""Reads one ThreeFSCluster: its StatefulSets, pods, claims, Jobs and the health of its 3FS."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flyer.kube.apiserver.errors import NotFoundError
from flyer.kube.apiserver.resources import CLAIMS, JOBS, PODS, STATEFULSETS
from flyer.kube.threefs.claims import pending_claims, with_reasons
from flyer.kube.threefs.events import newest_message
from flyer.kube.threefs.jobs import DRAIN_JOB, KEEP_JOB
from flyer.kube.threefs.names import KINDS, LABEL_COMPONENT, LABEL_INSTANCE, component
from flyer.kube.threefs.observed import (
    Observed,
    drain_job_of,
    ordinal_of_claim,
    pods_of,
    set_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from flyer.api import ThreeFSCluster
    from flyer.kube.apiserver import Api
    from flyer.kube.apiserver.resources import Resource
    from flyer.kube.threefs.health import Health
    from flyer.kube.threefs.observed import Pod, ServiceSet

__all__ = ["ClusterObserver", "find"]

Object = dict[str, Any]


async def find(api: Api, resource: Resource, name: str, namespace: str) -> Object | None:
    """The object, if it exists."""
    try:
        return await api.get(resource, name, namespace)
    except NotFoundError:
        return None


@dataclass
class ClusterObserver:
    """Observes one cluster repeatedly."""

    api: Api
    health_of: Callable[[Sequence[str]], Awaitable[Health | None]]
    _changed: dict[tuple[str, bool, float], float] = field(default_factory=dict, init=False)
    """When pods were first observed to be ready, or not: nodes have other clocks."""

    async def stateful_sets(self, namespace: str) -> dict[str, Object | None]:
        """The StatefulSets by service."""
        return {
            kind: await find(self.api, STATEFULSETS, component(kind), namespace) for kind in KINDS
        }

    async def observe(self, cluster: ThreeFSCluster, sets: dict[str, Object | None]) -> Observed:
        """Everything that a plan needs."""
        namespace, uid = cluster.metadata.namespace, cluster.metadata.uid
        instance = f"{LABEL_INSTANCE}={cluster.metadata.name}"
        values = await self.api.list(PODS, namespace, labelSelector=instance)
        all_claims = await self.api.list(CLAIMS, namespace, labelSelector=instance)
        claims = [
            claim for claim in all_claims
            if claim["metadata"]["labels"].get(LABEL_COMPONENT) == component("storage")
        ]  # fmt: skip
        jobs = {
            value["metadata"]["name"]: drain_job_of(value, values)
            for value in await self.api.list(JOBS, namespace, labelSelector=instance)
            if uid in [owner["uid"] for owner in value["metadata"].get("ownerReferences") or ()]
        }
        pods = {kind: pods_of(values, kind, sets[kind]) for kind in KINDS}
        addresses = [pod.address for pod in pods["mgmtd"] if pod.address and not pod.deleting]
        health = await self.health_of(addresses) if addresses else None
        pending = pending_claims(all_claims, sets, pods)
        return Observed(
            now=time.time(),
            pods=self._timed(pods),
            sets={
                kind: await self._set(value, len(pods[kind]))
                for kind, value in sets.items()
                if value is not None
            },
            health=health,
            drain=jobs.get(DRAIN_JOB),
            keep=jobs.get(KEEP_JOB),
            claims=_ordinals(
                claim for claim in claims if "deletionTimestamp" not in claim["metadata"]
            ),
            ending_claims=_ordinals(
                claim for claim in claims if "deletionTimestamp" in claim["metadata"]
            ),
            lost_claims={
                ordinal: claim["metadata"]["name"]
                for claim in claims
                if (claim.get("status") or {}).get("phase") == "Lost"
                and (ordinal := ordinal_of_claim(claim["metadata"]["name"])) is not None
            },
            pending_claims=await with_reasons(self.api, namespace, pending),
        )

    async def _set(self, value: Object, pods: int) -> ServiceSet:
        """A StatefulSet, with the reason if it has created fewer pods than it should have."""
        service, metadata = set_of(value), value["metadata"]
        if pods >= service.replicas:
            return service
        why = await newest_message(self.api, metadata["namespace"], metadata["uid"], "FailedCreate")
        return replace(service, problem=why)

    def _timed(self, pods: dict[str, tuple[Pod, ...]]) -> dict[str, tuple[Pod, ...]]:
        """The pods, with the time at which this process first observed whether they are ready."""
        now, before, self._changed = time.time(), self._changed, {}

        def timed(pod: Pod) -> Pod:
            is_ready = pod.ready_since is not None
            key = pod.uid, is_ready, pod.ready_since or pod.unready_since
            since = self._changed[key] = before.get(key, now)
            if is_ready:
                return replace(pod, ready_since=since)
            return replace(pod, unready_since=since)

        return {kind: tuple(timed(pod) for pod in of_kind) for kind, of_kind in pods.items()}


def _ordinals(claims: Any) -> frozenset[int]:
    ordinals = (ordinal_of_claim(claim["metadata"]["name"]) for claim in claims)
    return frozenset(ordinal for ordinal in ordinals if ordinal is not None)

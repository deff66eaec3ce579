"""Pod control: idempotent calls that create, bind and delete one pod.

An existing pod is used, a bound one left, and a missing one counts as deleted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver import Limiter
from flyer.kube.apiserver.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS, PODS
from flyer.kube.cache.pod_view import controller_of
from flyer.kube.pods.names import GATE

if TYPE_CHECKING:
    from flyer.api import FlyerJob
    from flyer.kube.apiserver import Api, Cache
    from flyer.kube.cache.pod_view import PodView

__all__ = ["KILL_SECONDS", "PodControl"]

# Bounds pod calls, which are many, so that commits and the Lease neither queue behind them nor wait
# for a busy server. A server with many cores answers this many faster than they can be sent.
CONCURRENCY_MAX: Final = 16
# The same during commits, which block the scheduler until they are stored.
CONCURRENCY_DURING_COMMITS: Final = 4
# Minimum that a kubelet honours; 0 would remove the object while processes still run.
KILL_SECONDS: Final = 1
# A foreign pod may have one of the names until the garbage collector deletes it.
NAME_TAKEN_SECONDS: Final = 30.0
NAME_TAKEN_POLL_SECONDS: Final = 0.5
CONFLICT_SECONDS: Final = 0.2
BIND_TRIES_MAX: Final = 5

log = logging.getLogger(__name__)


class PodControl:
    """Pod calls. Each response is put into the cache before the watch reports it."""

    def __init__(self, api: Api, pods: Cache[PodView | None]) -> None:
        self.limiter = limiter = Limiter(CONCURRENCY_MAX, CONCURRENCY_DURING_COMMITS)
        self._api = api.with_limiter(limiter)
        # Bindings and deletions precede creations: of many jobs that start together, the first
        # do not wait for the pods of the last.
        self._priority_api = api.with_limiter(limiter.priority)
        self._pods = pods

    async def create(self, job: FlyerJob, manifest: dict[str, Any], node: str) -> dict[str, Any]:
        """Create the pod of this manifest for this node, or return the job's existing one.

        Retries for a while: a name taken by the pod of a deleted job or a foreign pod may become
        free, and a conflict (of a ResourceQuota that several API servers update) may pass.
        """
        name, namespace = manifest["metadata"]["name"], job.metadata.namespace
        current = self._pods.get(namespace, name)
        exists = current is not None and current.owner == job.metadata.uid and not current.deleting
        if current is not None and exists and current.node == node:
            return _bound(current)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + NAME_TAKEN_SECONDS
        while True:
            try:
                if not exists:
                    pod = await self._api.create(PODS, manifest, namespace)
                    break
                pod = await self._api.get(PODS, name, namespace)
            except AlreadyExistsError:
                if loop.time() >= ends_at:
                    raise
                exists = True
                continue
            except ConflictError:
                if loop.time() >= ends_at:
                    raise
                await asyncio.sleep(CONFLICT_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311
                continue
            except NotFoundError:
                if not exists:
                    raise
                exists = False
                continue
            if self._is_usable(job, pod, node):
                break
            await self._delete_conflicting(job, pod)
            await asyncio.sleep(NAME_TAKEN_POLL_SECONDS)
            exists = False
        self._pods.offer(pod)
        return pod

    @staticmethod
    def _is_usable(job: FlyerJob, pod: dict[str, Any], node: str) -> bool:
        owner = controller_of(pod["metadata"])
        is_owned = owner is not None and owner["uid"] == job.metadata.uid
        node_name = pod["spec"].get("nodeName")
        return (
            is_owned
            and "deletionTimestamp" not in pod["metadata"]
            and node_name in (None, "", node)
        )

    async def _delete_conflicting(self, job: FlyerJob, pod: dict[str, Any]) -> None:
        """Delete a conflicting pod whose controller is a FlyerJob of this name.

        Either that job was deleted and garbage collection is slow, or the pod is bound to a wrong
        node.
        """
        metadata = pod["metadata"]
        owner = controller_of(metadata)
        if owner is None or owner["name"] != job.metadata.name or "deletionTimestamp" in metadata:
            return
        await self.delete(metadata["namespace"], metadata["name"], metadata["uid"], KILL_SECONDS)

    async def wait_ended(self, pod: PodView) -> None:
        """Wait until this pod, which disappeared from the watch, has no processes.

        A force-deleted pod is gone. But a pod that lost its label disappears from the watch while
        it runs: it is deleted.
        """
        while True:
            try:
                current = await self._priority_api.get(PODS, pod.name, pod.namespace)
            except NotFoundError:
                return
            except ApiError as error:
                log.warning("%s/%s: %s", pod.namespace, pod.name, error)
            else:
                phase = (current.get("status") or {}).get("phase")
                if current["metadata"]["uid"] != pod.uid or phase in ("Succeeded", "Failed"):
                    return
                await self.delete(pod.namespace, pod.name, pod.uid, KILL_SECONDS)
            await asyncio.sleep(NAME_TAKEN_POLL_SECONDS)

    async def is_assigned(self, pod: PodView) -> bool:
        """Whether the job that controls this pod exists and its status has the pod's node."""
        namespace, _, name = pod.job.partition("/")
        try:
            job = await self._priority_api.get(FLYERJOBS, name, namespace)
        except NotFoundError:
            return False
        except ApiError as error:
            log.warning(
                "cannot read the job of orphan %s/%s, keeping the pod: %s",
                pod.namespace,
                pod.name,
                error,
            )
            return True
        occupied = (job.get("status") or {}).get("occupied") or ()
        assigned = any(
            node.get("name") == pod.node and node.get("attempt") == pod.attempt for node in occupied
        )
        return job["metadata"]["uid"] == pod.owner and assigned

    async def bind(self, pod: dict[str, Any], node: str) -> None:
        """Bind the pod; on a shared node, remove its scheduling gate for kube-scheduler."""
        for tries_left in reversed(range(BIND_TRIES_MAX)):
            try:
                await self._bind_once(pod, node)
            except NotFoundError:
                return  # deleted by a user, which `report_empty_nodes` observes
            except ConflictError:
                uid = pod["metadata"]["uid"]
                try:
                    pod = await self._priority_api.get(
                        PODS, pod["metadata"]["name"], pod["metadata"]["namespace"]
                    )
                except NotFoundError:
                    return
                if pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
                    return
                self._pods.offer(pod)
                node_name = pod["spec"].get("nodeName")
                if node_name == node:
                    return  # by a previous try whose response was lost
                if node_name or not tries_left:
                    raise
            else:
                return

    async def _bind_once(self, pod: dict[str, Any], node: str) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        if spec.get("nodeName"):
            return
        name, namespace = metadata["name"], metadata["namespace"]
        gates = spec.get("schedulingGates") or []
        if any(gate["name"] == GATE for gate in gates):
            remaining = [gate for gate in gates if gate["name"] != GATE]
            patch = {
                "metadata": {"resourceVersion": metadata["resourceVersion"]},
                "spec": {"schedulingGates": remaining or None},
            }
            await self._priority_api.merge(PODS, name, patch, namespace)
        elif spec.get("schedulerName") != "default-scheduler":
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name, "uid": metadata["uid"]},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
            await self._priority_api.post(PODS, name, namespace, "binding", binding)

    async def delete(self, namespace: str, name: str, uid: str, grace_seconds: int) -> None:
        """Delete the pod with this uid, if it exists."""
        try:
            await self._priority_api.delete(
                PODS, name, namespace, uid=uid, grace_seconds=grace_seconds
            )
        except (NotFoundError, ConflictError):
            return  # deleted or replaced
        except ApiError as error:
            log.warning("cannot delete pod %s/%s yet: %s", namespace, name, error)


def _bound(pod: PodView) -> dict[str, Any]:
    """The fields of the object that its binding and gang need."""
    return {
        "metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
        "spec": {"nodeName": pod.node},
        "status": {"podIP": pod.ip},
    }

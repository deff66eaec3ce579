"""The calls that make, bind and delete one pod; each may be repeated.

A pod that is there is used, one that is bound is left, one that is gone is no news.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.client import Lane
from flyer.kube.client.errors import AlreadyExistsError, ApiError, ConflictError, NotFoundError
from flyer.kube.client.resources import FLYERJOBS, PODS
from flyer.kube.pods.names import GATE
from flyer.kube.services.views import controller_of

if TYPE_CHECKING:
    from flyer.api import FlyerJob
    from flyer.kube.client import Api, Cache
    from flyer.kube.services.views import PodView

__all__ = ["KILL_SECONDS", "PodCalls", "pod_lane"]

# Pods are many: commits and the Lease neither queue behind them nor wait for a server that is busy
# with hundreds of them. A server of many cores answers so many faster than we can send them.
AT_ONCE: Final = 16
# While commits are under way: the scheduler stands still until they are stored.
BESIDE_COMMITS: Final = 4
# The least that a kubelet honours; 0 would remove the object while processes still live.
KILL_SECONDS: Final = 1
# Somebody else's pod may have one of our names while the garbage collector takes it away.
NAME_TAKEN_SECONDS: Final = 30.0
NAME_TAKEN_POLL_SECONDS: Final = 0.5
CONFLICT_SECONDS: Final = 0.2
PLACE_TRIES_MAX: Final = 5

log = logging.getLogger(__name__)


def pod_lane() -> Lane:
    """Of one term, for all calls about pods."""
    return Lane(AT_ONCE, BESIDE_COMMITS)


class PodCalls:
    """What a call answers goes into the cache before the watch tells it."""

    def __init__(self, api: Api, pods: Cache[PodView | None], lane: Lane) -> None:
        self._api = api.apart(lane)
        # What is there is bound or deleted before more is made: of many jobs that start together
        # the first do not wait for the pods of the last.
        self._soon = api.apart(lane.ahead)
        self._pods = pods

    async def create(self, job: FlyerJob, manifest: dict[str, Any], node: str) -> dict[str, Any]:
        """The pod of this manifest for this node: a new one, or one of this very job.

        A name that is taken, by the pod of a job that was deleted or by somebody else's, may become
        free, and a conflict (of a ResourceQuota that several API servers count) may pass: it is
        tried again for a while.
        """
        name, namespace = manifest["metadata"]["name"], job.metadata.namespace
        known = self._pods.get(namespace, name)
        there = known is not None and known.owner == job.metadata.uid and not known.deleting
        if known is not None and there and known.node == node:
            return _bound(known)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + NAME_TAKEN_SECONDS
        while True:
            try:
                if not there:
                    made = await self._api.create(PODS, manifest, namespace)
                    break
                made = await self._api.get(PODS, name, namespace)
            except AlreadyExistsError:
                if loop.time() >= ends_at:
                    raise
                there = True
                continue
            except ConflictError:
                if loop.time() >= ends_at:
                    raise
                await asyncio.sleep(CONFLICT_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311
                continue
            except NotFoundError:
                if not there:
                    raise
                there = False
                continue
            if self._is_usable(job, made, node):
                break
            await self._give_way(job, made)
            await asyncio.sleep(NAME_TAKEN_POLL_SECONDS)
            there = False
        self._pods.offer(made)
        return made

    @staticmethod
    def _is_usable(job: FlyerJob, pod: dict[str, Any], node: str) -> bool:
        owner = controller_of(pod["metadata"])
        ours = owner is not None and owner["uid"] == job.metadata.uid
        bound = pod["spec"].get("nodeName")
        return ours and "deletionTimestamp" not in pod["metadata"] and bound in (None, "", node)

    async def _give_way(self, job: FlyerJob, pod: dict[str, Any]) -> None:
        """End a pod with our name that a FlyerJob of this name controls.

        Either that job was deleted, and garbage collection is slow, or the pod is bound where
        nobody decided.
        """
        metadata = pod["metadata"]
        owner = controller_of(metadata)
        if owner is None or owner["name"] != job.metadata.name or "deletionTimestamp" in metadata:
            return
        await self.delete(metadata["namespace"], metadata["name"], metadata["uid"], KILL_SECONDS)

    async def ended(self, pod: PodView) -> None:
        """Until this pod, of which nothing is told any more, is seen to have no processes.

        Deleted with force it is gone at once. But whoever takes our label from a pod hides it from
        the watch while it lives: such a pod is deleted.
        """
        while True:
            try:
                found = await self._soon.get(PODS, pod.name, pod.namespace)
            except NotFoundError:
                return
            except ApiError as error:
                log.warning("%s/%s: %s", pod.namespace, pod.name, error)
            else:
                phase = (found.get("status") or {}).get("phase")
                if found["metadata"]["uid"] != pod.uid or phase in ("Succeeded", "Failed"):
                    return
                await self.delete(pod.namespace, pod.name, pod.uid, KILL_SECONDS)
            await asyncio.sleep(NAME_TAKEN_POLL_SECONDS)

    async def wanted(self, pod: PodView) -> bool:
        """Whether the job that controls this pod exists, and its status has the pod's node."""
        namespace, _, name = pod.job.partition("/")
        try:
            job = await self._soon.get(FLYERJOBS, name, namespace)
        except NotFoundError:
            return False
        except ApiError as error:
            log.warning("%s/%s is not ended yet: %s", pod.namespace, pod.name, error)
            return True
        occupied = (job.get("status") or {}).get("occupied") or ()
        here = any(
            one.get("name") == pod.node and one.get("attempt") == pod.attempt for one in occupied
        )
        return job["metadata"]["uid"] == pod.owner and here

    async def place(self, pod: dict[str, Any], node: str) -> None:
        """Bind it; where nodes are shared, open our gate, and Kubernetes' scheduler binds it."""
        for tries_left in reversed(range(PLACE_TRIES_MAX)):
            try:
                await self._place_once(pod, node)
            except NotFoundError:
                return  # deleted by hand: `look` sees it
            except ConflictError:
                uid = pod["metadata"]["uid"]
                try:
                    pod = await self._soon.get(
                        PODS, pod["metadata"]["name"], pod["metadata"]["namespace"]
                    )
                except NotFoundError:
                    return
                if pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
                    return
                self._pods.offer(pod)
                bound = pod["spec"].get("nodeName")
                if bound == node:
                    return  # by ourselves: the answer was lost
                if bound or not tries_left:
                    raise
            else:
                return

    async def _place_once(self, pod: dict[str, Any], node: str) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        if spec.get("nodeName"):
            return
        name, namespace = metadata["name"], metadata["namespace"]
        gates = spec.get("schedulingGates") or []
        if any(one["name"] == GATE for one in gates):
            left = [one for one in gates if one["name"] != GATE]
            patch = {
                "metadata": {"resourceVersion": metadata["resourceVersion"]},
                "spec": {"schedulingGates": left or None},
            }
            await self._soon.merge(PODS, name, patch, namespace)
        elif spec.get("schedulerName") != "default-scheduler":
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name, "uid": metadata["uid"]},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
            await self._soon.post(PODS, name, namespace, "binding", binding)

    async def delete(self, namespace: str, name: str, uid: str, grace_seconds: int) -> None:
        """Delete this very pod, if it is still there."""
        try:
            await self._soon.delete(PODS, name, namespace, uid=uid, grace_seconds=grace_seconds)
        except (NotFoundError, ConflictError):
            return  # gone, or another one by now
        except ApiError as error:
            log.warning("%s/%s is not deleted yet: %s", namespace, name, error)


def _bound(pod: PodView) -> dict[str, Any]:
    """As much of the object as its binding and its gang need."""
    return {
        "metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
        "spec": {"nodeName": pod.node},
        "status": {"podIP": pod.ip},
    }

"""Adoption of gangs: a new leader, or a rebuilt state, takes over the pods of running jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from flyer.api import Phase
from flyer.engine import Start
from flyer.kube.apiserver.resources import PODS
from flyer.kube.pods.names import LABEL_JOB

if TYPE_CHECKING:
    from flyer.api import FlyerJob
    from flyer.kube.apiserver import Api
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.services.pods.gangs import Gangs

__all__ = ["Adoption"]

_LIVE: Final = (Phase.RUNNING, Phase.SUSPENDING)


class Adoption:
    """Adoption during one term."""

    def __init__(self, api: Api, cache: ClusterCache, gangs: Gangs) -> None:
        self._api = api
        self._cache = cache
        self._gangs = gangs

    async def adopt(self, job: FlyerJob) -> None:
        """Adopt the gang of a job that has one."""
        status = job.status
        if status is None or not status.occupied:
            return
        attempt, assignment = status.history.attempt, status.assignment
        # In every phase: a node without a running pod is assigned to the next job.
        pods = self._cache.pods_of(job.key, job.metadata.uid)
        living = {pod.node for pod in pods if not pod.ended}
        if not living.issuperset(node.name for node in status.occupied):
            await self._confirm(job)
        if status.phase in _LIVE and assignment is not None:
            self._gangs.adopt(
                job,
                Start(
                    job.key,
                    attempt,
                    assignment,
                    status.checkpoint,
                    status.history.user_state,
                    uid=job.metadata.uid or "",
                ),
            )
        for pod in self._cache.pods_of(job.key, job.metadata.uid):
            self._gangs.locate(pod)
            if pod.ended and pod.attempt == attempt:
                self._gangs.conclude(pod)
        self._gangs.report_empty_nodes(job.key)

    async def _confirm(self, job: FlyerJob) -> None:
        """List the job's pods, because missing ones may only be late in the watch."""
        selector = f"{LABEL_JOB}={job.metadata.name}"
        for pod in await self._api.list(PODS, job.metadata.namespace, labelSelector=selector):
            self._cache.pods.offer(pod)

"""Observer: hands changed pods to their gangs, deletes orphan pods, and reports the topology."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flyer.engine import TeamObserved, ZonesObserved
from flyer.kube.services.pods.pod_control import KILL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from flyer.engine import EngineState, Event, Zones
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.pod_view import PodView
    from flyer.kube.services.jobs.quarantine import Quarantine
    from flyer.kube.services.jobs.submissions import Submissions
    from flyer.kube.services.nodes.nodes import Nodes
    from flyer.kube.services.pods.gangs import Gangs
    from flyer.kube.services.pods.pod_control import PodControl

__all__ = ["Observer"]

log = logging.getLogger(__name__)


class Observer:
    """The observer of one term."""

    def __init__(
        self,
        cache: ClusterCache,
        quarantine: Quarantine,
        submissions: Submissions,
        gangs: Gangs,
        nodes: Nodes,
        pod_control: PodControl,
        *,
        state: Callable[[], EngineState],
        zones: Callable[[], Zones],
        enqueue: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None], str, str], object],
    ) -> None:
        self._cache = cache
        self._quarantine = quarantine
        self._submissions = submissions
        self._gangs = gangs
        self._nodes = nodes
        self._pod_control = pod_control
        self._state = state
        self._zones = zones
        self._enqueue = enqueue
        self._spawn = spawn
        self._orphans: set[str] = set()  # uids of orphans being deleted
        self._shortened: set[str] = set()  # uids of orphans whose own deletion was shortened

    def pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        """A pod of a FlyerJob was added, changed or deleted."""
        pod = after or before
        assert pod is not None, "a change without an object"
        with self._quarantine.guard(pod.job, "handling a pod"):
            in_engine = pod.job in self._state().jobs
            if pod.attempt and in_engine and pod.owner == self._submissions.uid_of(pod.job):
                self._gangs.pod_changed(before, after)
            elif after is None:
                self._gangs.release(pod.uid)
            self.check_orphan(pod, deleted=after is None)

    def topology_changed(self) -> None:
        """The spec of the FlyerTopology was added, changed or deleted."""
        self._enqueue(ZonesObserved(self._zones()))
        for namespace in {*self._state().teams, *self._cache.teams()}:
            self._enqueue(TeamObserved(namespace, self._cache.team_of(namespace)))

    # -- orphan pods ---------------------------------------------------------------------------

    def check_pods(self) -> None:
        """Check every pod, at the start of a term and after a rebuild."""
        for pod in list(self._cache.pods.values()):
            if pod is not None:
                with self._quarantine.guard(pod.job, "handling a pod"):
                    self.check_orphan(pod, term_start=True)

    def check_orphan(
        self, pod: PodView, *, deleted: bool = False, term_start: bool = False
    ) -> None:
        """Delete a bound pod that no job's status accounts for.

        Orphans of deleted jobs that exist at `term_start` were bound by an earlier leader: they
        block their nodes until they are gone. An orphan that appears later blocks no node, whatever
        its owner reference says: the operator binds no pods of deleted jobs, so did not bind it.
        """
        if not pod.node:
            return
        unaccounted = not deleted and not pod.ended and not self._is_accounted_for(pod)
        view = self._cache.job(pod.job)
        orphan = view is None or view.uid != pod.owner
        if unaccounted:
            self._delete(pod)
        else:
            self._shortened.discard(pod.uid)
        if self._nodes.observe_orphan(pod, live=unaccounted and orphan, term_start=term_start):
            self._nodes.changed(pod.node)

    def _is_accounted_for(self, pod: PodView) -> bool:
        """Whether a job's status accounts for this pod on its node."""
        job = self._state().jobs.get(pod.job)
        if job is None or pod.owner != self._submissions.uid_of(pod.job):
            view = self._cache.job(pod.job)
            # Pods of unreadable and quarantined jobs are left in place.
            owner_exists = view is not None and view.uid == pod.owner
            is_over = view is not None and view.forgettable
            return owner_exists and (pod.job in self._quarantine or not is_over)
        occupied = {(node.name, node.attempt) for node in job.status.occupied}
        return bool(pod.attempt) and (pod.node, pod.attempt) in occupied

    def _delete(self, pod: PodView) -> None:
        """Delete an orphan. One that is being deleted gets a shorter grace period, once.

        Its own grace period may be minutes, for which it blocks the node.
        """
        if pod.uid not in self._orphans and pod.uid not in self._shortened:
            self._orphans.add(pod.uid)
            if pod.deleting:
                self._shortened.add(pod.uid)
            self._spawn(self._delete_unless_assigned(pod), f"orphan {pod.name}", pod.job)

    async def _delete_unless_assigned(self, pod: PodView) -> None:
        """Delete the orphan unless the stored job accounts for it: the cache may be stale."""
        try:
            if await self._pod_control.is_assigned(pod):
                return
            log.warning(
                "deleting orphan pod %s/%s on %s: no job's status accounts for it",
                pod.namespace, pod.name, pod.node,
            )  # fmt: skip
            await self._pod_control.delete(pod.namespace, pod.name, pod.uid, KILL_SECONDS)
        finally:
            self._orphans.discard(pod.uid)

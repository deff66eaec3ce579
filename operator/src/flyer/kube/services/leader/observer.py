"""Observer: turns changes of cached objects into events for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer import engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.api import FlyerQuota
    from flyer.engine import EngineState, Event, Zones
    from flyer.kube.services.cluster_cache import ClusterCache
    from flyer.kube.services.jobs.commits import Commits
    from flyer.kube.services.jobs.quarantine import Quarantine
    from flyer.kube.services.jobs.submissions import Submissions
    from flyer.kube.services.nodes.nodes import Nodes
    from flyer.kube.services.pods.gangs import Gangs
    from flyer.kube.views import JobView, PodView

__all__ = ["Observer"]


class Observer:
    """The listener of one term (`flyer.kube.services.cluster_cache.Listener`)."""

    def __init__(
        self,
        cache: ClusterCache,
        quarantine: Quarantine,
        submissions: Submissions,
        commits: Commits,
        gangs: Gangs,
        nodes: Nodes,
        *,
        state: Callable[[], EngineState],
        zones: Callable[[], Zones],
        enqueue: Callable[[Event], None],
        request_rebuild: Callable[[str], None],
    ) -> None:
        self._cache = cache
        self._quarantine = quarantine
        self._submissions = submissions
        self._commits = commits
        self._gangs = gangs
        self._nodes = nodes
        self._state = state
        self._zones = zones
        self._enqueue = enqueue
        self.request_rebuild = request_rebuild

    def job_changed(self, before: JobView | None, after: JobView | None) -> None:
        """A FlyerJob was added, changed or deleted."""
        view = after or before
        assert view is not None, "a change without an object"
        with self._quarantine.guard(view.key, "reading the job"):
            self._submissions.changed(before, after)
            if after is not None and self._commits.is_foreign(after):
                self.request_rebuild(f"{after.key}: another writer changed its status")

    def pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        """A pod of a FlyerJob was added, changed or deleted."""
        pod = after or before
        assert pod is not None, "a change without an object"
        with self._quarantine.guard(pod.job, "handling a pod"):
            in_engine = pod.job in self._state().jobs
            if pod.attempt and in_engine and pod.owner == self._submissions.uid_of(pod.job):
                self._gangs.pod_changed(before, after)
            self.check_orphan(pod, gone=after is None)

    def node_changed(self, name: str) -> None:
        """A node or its NodeHealth was added, changed or deleted."""
        self._nodes.changed(name)

    def quota_changed(self, name: str, quota: FlyerQuota | None) -> None:
        """A FlyerQuota was added, changed or deleted."""
        if quota is None:
            self._enqueue(engine.QuotaRemoved(name))
        else:
            self._enqueue(engine.QuotaObserved(engine.Quota.of(quota)))

    def topology_changed(self) -> None:
        """The spec of the FlyerTopology was added, changed or deleted."""
        self._enqueue(engine.ZonesObserved(self._zones()))
        for namespace in {*self._state().teams, *self._cache.teams()}:
            self.namespace_changed(namespace)

    def namespace_changed(self, name: str) -> None:
        """The labels of a namespace changed: it may have another team."""
        self._enqueue(engine.TeamObserved(name, self._cache.team_of(name)))

    # -- orphan pods ---------------------------------------------------------------------------

    def check_pods(self) -> None:
        """Check every pod, at the start of a term and after a rebuild."""
        for pod in list(self._cache.pods.values()):
            if pod is not None:
                with self._quarantine.guard(pod.job, "handling a pod"):
                    self.check_orphan(pod, term_start=True)

    def check_orphan(self, pod: PodView, *, gone: bool = False, term_start: bool = False) -> None:
        """Delete a bound pod that no job's status accounts for.

        Orphans of deleted jobs that exist at `term_start` were bound by an earlier leader: they
        block their nodes until they are gone. One that appears later was not bound by the operator,
        which binds no pods of deleted jobs, whatever its owner reference says: it blocks no node.
        """
        if not pod.node:
            return
        lives = not gone and not pod.ended and not self._is_decided(pod)
        view = self._cache.job(pod.job)
        orphan = view is None or view.uid != pod.owner
        if lives:
            self._gangs.delete_orphan(pod)
        if self._nodes.observe_orphan(pod, lives=lives and orphan, term_start=term_start):
            self.node_changed(pod.node)

    def _is_decided(self, pod: PodView) -> bool:
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

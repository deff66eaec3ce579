"""What the cluster says, as the engine is told it: jobs, pods, nodes, quotas and the topology."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer import engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.api import FlyerQuota
    from flyer.engine import EngineState, Event, Zones
    from flyer.kube.services.apart import LeftAlone
    from flyer.kube.services.commits import Commits
    from flyer.kube.services.gangs import Gangs
    from flyer.kube.services.nodes import Nodes
    from flyer.kube.services.submissions import Submissions
    from flyer.kube.services.views import JobView, PodView
    from flyer.kube.services.world import World

__all__ = ["Observer"]


class Observer:
    """The listener of one term (`flyer.kube.services.world.Listener`)."""

    def __init__(
        self,
        world: World,
        left: LeftAlone,
        submissions: Submissions,
        commits: Commits,
        gangs: Gangs,
        nodes: Nodes,
        *,
        state: Callable[[], EngineState],
        zones: Callable[[], Zones],
        tell: Callable[[Event], None],
        confused: Callable[[str], None],
    ) -> None:
        self._world = world
        self._left = left
        self._submissions = submissions
        self._commits = commits
        self._gangs = gangs
        self._nodes = nodes
        self._state = state
        self._zones = zones
        self._tell = tell
        self.confused = confused

    def job_changed(self, before: JobView | None, after: JobView | None) -> None:
        """A FlyerJob came, changed or went."""
        view = after or before
        assert view is not None, "a change of nothing"
        with self._left.guard(view.key, "reading the job"):
            self._submissions.changed(before, after)
            if after is not None and self._commits.is_foreign(after):
                self.confused(f"{after.key}: somebody else wrote its status")

    def pod_changed(self, before: PodView | None, after: PodView | None) -> None:
        """A pod of a FlyerJob came, changed or went."""
        pod = after or before
        assert pod is not None, "a change of nothing"
        with self._left.guard(pod.job, "looking at a pod"):
            known = pod.job in self._state().jobs
            if pod.attempt and known and pod.owner == self._submissions.uid_of(pod.job):
                self._gangs.pod_changed(before, after)
            self.see_stray(pod, gone=after is None)

    def node_changed(self, name: str) -> None:
        """A node, or what is known of its health, came, changed or went."""
        self._nodes.changed(name)

    def quota_changed(self, name: str, quota: FlyerQuota | None) -> None:
        """A FlyerQuota came, changed or went."""
        if quota is None:
            self._tell(engine.QuotaRemoved(name))
        else:
            self._tell(engine.QuotaObserved(engine.Quota.of(quota)))

    def topology_changed(self) -> None:
        """What the FlyerTopology asks for came, changed or went."""
        self._tell(engine.ZonesObserved(self._zones()))
        for namespace in {*self._state().teams, *self._world.teams()}:
            self.namespace_changed(namespace)

    def namespace_changed(self, name: str) -> None:
        """The labels of a namespace came, changed or went: it may have another team."""
        self._tell(engine.TeamObserved(name, self._world.team_of(name)))

    # -- pods that no job decided --------------------------------------------------------------

    def see_pods(self) -> None:
        """Look at every pod, as a term begins or reads everything again."""
        for pod in list(self._world.pods.values()):
            if pod is not None:
                with self._left.guard(pod.job, "looking at a pod"):
                    self.see_stray(pod, begins=True)

    def see_stray(self, pod: PodView, *, gone: bool = False, begins: bool = False) -> None:
        """End a bound pod of ours that no job decided.

        Those that an earlier leader left of jobs that were deleted since (seen when a term
        `begins`) keep their nodes from being given out until they are gone. What comes up later is
        none of ours, whatever its owner reference says, for we bind no pods of jobs that are gone:
        it takes no node out.
        """
        if not pod.node:
            return
        lives = not gone and not pod.ended and not self._is_decided(pod)
        view = self._world.job(pod.job)
        orphan = view is None or view.uid != pod.owner
        if lives:
            self._gangs.stray(pod)
        if self._nodes.saw(pod, lives=lives and orphan, begins=begins):
            self.node_changed(pod.node)

    def _is_decided(self, pod: PodView) -> bool:
        """Whether a job's status says that this pod may be where it is."""
        job = self._state().jobs.get(pod.job)
        if job is None or pod.owner != self._submissions.uid_of(pod.job):
            view = self._world.job(pod.job)
            # What cannot be read or is left alone is not judged.
            known = view is not None and view.uid == pod.owner
            is_over = view is not None and view.forgettable
            return known and (pod.job in self._left or not is_over)
        places = {(one.name, one.attempt) for one in job.status.occupied}
        return bool(pod.attempt) and (pod.node, pod.attempt) in places

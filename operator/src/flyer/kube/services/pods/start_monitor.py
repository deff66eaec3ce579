"""Start monitor: reports why a gang's pods do not start, before the start deadline.

A problem that lasts for `CONFIRM_SECONDS` ends the start and releases the nodes. It counts as the
job's fault (a missing image, claim or Secret) or as that of the affected nodes, which the next
attempt avoids.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from flyer.api import Phase
from flyer.engine import StartFailed, StartPending
from flyer.kube.pods.names import pod_place
from flyer.kube.services.pods.missing_volumes import missing_for_volumes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine import Event, JobState, Start
    from flyer.kube.apiserver import Api
    from flyer.kube.cache.pod_view import PodView
    from flyer.kube.pods.pod_problems import PodProblem
    from flyer.kube.services.dependencies import Gateway

__all__ = ["StartMonitor"]

POLL_SECONDS: Final = 1.0
# A registry or a Secret may be briefly late; the reason should appear within 15 s.
CONFIRM_SECONDS: Final = 6.0
# Pods that wait for volumes report nothing for minutes: their volumes are checked after this time.
STUCK_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 4.0
# Missing pods are reported after this time, not while all pods are still starting.
PENDING_SECONDS: Final = 5.0


class StartMonitor:
    """The monitor of one term."""

    def __init__(
        self,
        api: Api,
        gateway: Gateway,
        *,
        enqueue: Callable[[Event], None],
        state_of: Callable[[str], JobState | None],
        pods_of: Callable[[str], list[PodView]],
    ) -> None:
        self._api = api.with_limiter(asyncio.Semaphore(4))
        self._gateway = gateway
        self._enqueue = enqueue
        self._state_of = state_of
        self._pods_of = pods_of

    def is_starting(self, job: str, attempt: int, uid: str) -> bool:
        """Whether this attempt has not started yet. `uid`: of the job."""
        state = self._state_of(job)
        if state is None or state.status.phase is not Phase.STARTING:
            return False
        return (state.status.history.attempt, state.uid) == (attempt, uid)

    def failed(self, pod: PodView) -> None:
        """Report a pod that terminated before the start because its kubelet rejected it."""
        if pod.problem is not None and self.is_starting(pod.job, pod.attempt, pod.owner):
            self._report(pod.job, pod.attempt, pod.owner, {pod.node: pod.problem})

    async def watch(self, start: Start, spec: Mapping[str, Any]) -> None:
        """Monitor until the attempt has started, is over, or cannot start."""
        loop = asyncio.get_running_loop()
        started_at, since = loop.time(), None
        absent: tuple[str, ...] | None = None
        missing, look_at = None, started_at
        while self.is_starting(start.job, start.attempt, start.uid):
            await asyncio.sleep(POLL_SECONDS)
            pods = [
                pod for pod in self._pods_of(start.job)
                if pod.attempt == start.attempt and not pod.ended
            ]  # fmt: skip
            if loop.time() - started_at >= PENDING_SECONDS:
                places = self._absent(start)
                if places != absent:
                    absent = places
                    self._enqueue(StartPending(start.job, start.attempt, places, uid=start.uid))
            problems = {pod.node: pod.problem for pod in pods if pod.problem is not None}
            waiting = next((pod for pod in pods if pod.phase == "Pending"), None)
            if not problems and waiting and loop.time() - started_at >= STUCK_SECONDS:
                if loop.time() >= look_at:
                    look_at = loop.time() + LOOK_SECONDS
                    namespace, uid = waiting.namespace, waiting.uid
                    missing = await missing_for_volumes(self._api, namespace, spec, uid)
                problems = {waiting.node: missing} if missing is not None else {}
            if not problems:
                since = None
                continue
            since = loop.time() if since is None else since
            if loop.time() - since >= CONFIRM_SECONDS:
                self._report(start.job, start.attempt, start.uid, problems)
                return

    def _absent(self, start: Start) -> tuple[str, ...]:
        """Nodes whose pods the start is waiting for."""
        names, job = start.assignment.names, start.job.partition("/")[2]
        places = [pod_place(job, name) for name in self._gateway.absent(start.job)]
        return tuple(
            names[place[1]]
            for place in places
            if place is not None and place[0] == start.attempt and place[1] < len(names)
        )

    def _report(self, job: str, attempt: int, uid: str, problems: dict[str, PodProblem]) -> None:
        if not self.is_starting(job, attempt, uid):
            return
        own = [problem for problem in problems.values() if problem.job_fault]
        node, problem = next(iter(problems.items()))
        if own:
            why = f"its pods cannot start: {own[0]}"
            self._enqueue(StartFailed(job, attempt, why, tuple(problems), job_fault=True, uid=uid))
        else:
            why = f"the pod on node {node} cannot start: {problem}"
            self._enqueue(StartFailed(job, attempt, why, tuple(problems), uid=uid))

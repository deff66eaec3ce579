"""Gangs that start: what their kubelets say is told before the start deadline passes.

A trouble that lasts for `CONFIRM_SECONDS` ends the start, so that the nodes are given back: as the
job's own fault (an image, a claim, a Secret that is missing), or as that of the nodes where it
shows, which the next attempt avoids.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from flyer.api import Phase
from flyer.engine import StartFailed, StartPending
from flyer.kube.pods.names import pod_place
from flyer.kube.services.volumes import missing_for_volumes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine import Event, JobState, Start
    from flyer.kube.client import Api
    from flyer.kube.services.seams import Gateway
    from flyer.kube.services.troubles import Trouble
    from flyer.kube.services.views import PodView

__all__ = ["Starts"]

POLL_SECONDS: Final = 1.0
# A registry or a Secret may be late by moments; people read the reason within 15 s of it.
CONFIRM_SECONDS: Final = 6.0
# Pods that wait for volumes say nothing of it for minutes: what these need is looked at then.
STUCK_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 4.0
# The pods that are missing are reported before any start deadline, and not while all still come up.
PENDING_SECONDS: Final = 5.0


class Starts:
    """Of one term."""

    def __init__(
        self,
        api: Api,
        gateway: Gateway,
        *,
        tell: Callable[[Event], None],
        state_of: Callable[[str], JobState | None],
        pods_of: Callable[[str], list[PodView]],
    ) -> None:
        self._api = api.apart(asyncio.Semaphore(4))
        self._gateway = gateway
        self._tell = tell
        self._state_of = state_of
        self._pods_of = pods_of

    def is_starting(self, job: str, attempt: int) -> bool:
        """Whether this attempt has not started yet."""
        state = self._state_of(job)
        starting = state is not None and state.status.phase is Phase.STARTING
        return starting and state is not None and state.status.chain.attempt == attempt

    def failed(self, pod: PodView) -> None:
        """A pod that ended before its attempt started, because its kubelet did not take it."""
        if pod.trouble is not None and self.is_starting(pod.job, pod.attempt):
            self._say(pod.job, pod.attempt, {pod.node: pod.trouble})

    async def watch(self, start: Start, spec: Mapping[str, Any]) -> None:
        """Until the attempt has started, or is over, or in trouble."""
        loop = asyncio.get_running_loop()
        began_at, since = loop.time(), None
        absent: tuple[str, ...] | None = None
        missing, look_at = None, began_at
        while self.is_starting(start.job, start.attempt):
            await asyncio.sleep(POLL_SECONDS)
            pods = [
                one for one in self._pods_of(start.job)
                if one.attempt == start.attempt and not one.ended
            ]  # fmt: skip
            if loop.time() - began_at >= PENDING_SECONDS:
                places = self._absent(start)
                if places != absent:
                    absent = places
                    self._tell(StartPending(start.job, start.attempt, places))
            troubles = {one.node: one.trouble for one in pods if one.trouble is not None}
            waiting = next((one for one in pods if one.phase == "Pending"), None)
            if not troubles and waiting and loop.time() - began_at >= STUCK_SECONDS:
                if loop.time() >= look_at:
                    look_at = loop.time() + LOOK_SECONDS
                    namespace, uid = waiting.namespace, waiting.uid
                    missing = await missing_for_volumes(self._api, namespace, spec, uid)
                troubles = {waiting.node: missing} if missing is not None else {}
            if not troubles:
                since = None
                continue
            since = loop.time() if since is None else since
            if loop.time() - since >= CONFIRM_SECONDS:
                self._say(start.job, start.attempt, troubles)
                return

    def _absent(self, start: Start) -> tuple[str, ...]:
        """Nodes whose pods the start still waits for."""
        names, job = start.assignment.names, start.job.partition("/")[2]
        places = [pod_place(job, name) for name in self._gateway.absent(start.job)]
        return tuple(
            names[place[1]]
            for place in places
            if place is not None and place[0] == start.attempt and place[1] < len(names)
        )

    def _say(self, job: str, attempt: int, troubles: dict[str, Trouble]) -> None:
        if not self.is_starting(job, attempt):
            return
        own = [one for one in troubles.values() if one.job_fault]
        node, trouble = next(iter(troubles.items()))
        if own:
            why = f"its pods cannot start: {own[0]}"
            self._tell(StartFailed(job, attempt, why, tuple(troubles), job_fault=True))
        else:
            why = f"the pod on node {node} cannot start: {trouble}"
            self._tell(StartFailed(job, attempt, why, tuple(troubles)))

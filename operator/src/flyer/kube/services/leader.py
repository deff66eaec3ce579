"""Candidate, leader, candidate again: terms one after the other, until told to end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from flyer.kube.client.election import LeadershipLostError
from flyer.kube.client.errors import ApiError
from flyer.kube.client.resources import PODS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flyer.kube.client import Api, Election
    from flyer.kube.metrics import Metrics
    from flyer.kube.services.term import Term
    from flyer.kube.services.world import World

__all__ = ["LABEL_LEADER", "Leader", "LeaderMark"]

# On the leader's own pod: the gateway's Service selects it.
LABEL_LEADER: Final = "fireflyer.dev/leader"
PAUSE_SECONDS: Final = 0.2
PAUSE_SECONDS_MAX: Final = 10.0
# A label can be taken away, and a leader before us may write late.
MARK_SECONDS: Final = 5.0

log = logging.getLogger(__name__)


class Leader:
    """Runs terms. `make_term(api, epoch, raise_epoch)` makes one; `mark` names the leader's pod.

    `beside` runs during a term and does not end it.
    """

    def __init__(
        self,
        api: Api,
        election: Election,
        world: World,
        make_term: Callable[[Api, int, Callable[[int], Awaitable[int]]], Term],
        metrics: Metrics,
        mark: LeaderMark | None = None,
        beside: Callable[[Term], Awaitable[None]] | None = None,
    ) -> None:
        self.term: Term | None = None
        self._api = api
        self._election = election
        self._world = world
        self._make_term = make_term
        self._metrics = metrics
        self._mark = mark
        self._beside = beside

    async def run(self) -> None:
        """Lead whenever that is possible, until cancelled; then give the Lease back."""
        pause_seconds = PAUSE_SECONDS
        # Whoever cannot see the cluster yet should not keep others from leading.
        await self._world.wait_synced()
        try:
            while True:
                epoch = await self._election.acquire()
                if await self._lead(epoch):
                    pause_seconds = PAUSE_SECONDS
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)
        finally:
            await self._election.release()

    async def _lead(self, epoch: int) -> bool:
        """One term; whether it served for as long as it had the right to."""
        api = self._api.fenced(self._election.fence)
        term = self.term = self._make_term(api, epoch, self._election.raise_epoch)
        self._metrics.leader.set(1)
        self._metrics.epoch.set(epoch)
        hold = asyncio.create_task(self._election.hold(), name="lease")
        work = asyncio.create_task(term.run(), name="term")
        marking = asyncio.create_task(self._marked(api), name="mark")
        beside = asyncio.create_task(self._run_beside(term), name="beside")
        tasks = (hold, work, marking, beside)
        try:
            await asyncio.wait({hold, work}, return_when=asyncio.FIRST_COMPLETED)
            return term.served and not _failed(work)
        finally:
            self._metrics.leader.set(0)
            self.term = None
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                _log_end(result)

    async def _run_beside(self, term: Term) -> None:
        if self._beside is not None:
            await term.ready.wait()  # taking over needs the processor more
            await self._beside(term)

    async def _marked(self, api: Api) -> None:
        if self._mark is None:
            return
        pause_seconds = PAUSE_SECONDS
        while True:
            try:
                await self._mark.set(api)
            except ApiError as error:
                log.warning("the leader's pod is not marked yet: %s", error)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)
            else:
                pause_seconds = PAUSE_SECONDS
                await asyncio.sleep(MARK_SECONDS)


class LeaderMark:
    """The label on the pod that leads, on no other."""

    def __init__(self, namespace: str, pod: str) -> None:
        self._namespace = namespace
        self._pod = pod

    async def set(self, api: Api) -> None:
        """Take the label from whoever had it, and put it on ourselves; nothing if it is so."""
        marked = await api.list(PODS, self._namespace, labelSelector=f"{LABEL_LEADER}=true")
        names = {one["metadata"]["name"] for one in marked}
        for name in names - {self._pod}:
            await self._write(api, name, None)
        if self._pod not in names:
            await self._write(api, self._pod, "true")

    async def _write(self, api: Api, pod: str, value: str | None) -> None:
        patch = {"metadata": {"labels": {LABEL_LEADER: value}}}
        await api.merge(PODS, pod, patch, self._namespace)


def _failed(work: asyncio.Task[None]) -> bool:
    """Whether it ended by another error than the loss of the right to write."""
    if work.cancelled():
        return True
    error = work.exception() if work.done() else None
    if isinstance(error, BaseExceptionGroup):
        error = error.split(LeadershipLostError)[1]
    return error is not None and not isinstance(error, LeadershipLostError)


def _log_end(result: object) -> None:
    """Say why a term ended, if that is news."""
    if isinstance(result, BaseExceptionGroup):
        lost, rest = result.split(LeadershipLostError)
        if lost is not None:
            log.warning("the term is over: %s", lost.exceptions[0])
        if rest is not None:
            log.error("the term ended by an error", exc_info=rest)
    elif isinstance(result, LeadershipLostError):
        log.warning("the term is over: %s", result)
    elif isinstance(result, Exception):
        log.error("the term ended by an error", exc_info=result)

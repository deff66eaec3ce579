"""Leader loop: acquires the Lease, runs a term, and competes for the Lease again."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from flyer.kube.apiserver.election import LeadershipLostError
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import PODS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flyer.kube.apiserver import Api, Election
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.metrics import Metrics
    from flyer.kube.services.leader.term import LeaderTerm

__all__ = ["LABEL_LEADER", "Leader", "LeaderMark"]

# Set on the leader's pod: the gateway's Service selects it.
LABEL_LEADER: Final = "fireflyer.dev/leader"
PAUSE_SECONDS: Final = 0.2
PAUSE_SECONDS_MAX: Final = 10.0
# The label can be removed, and a write of an earlier leader may arrive late.
MARK_SECONDS: Final = 5.0

log = logging.getLogger(__name__)


class Leader:
    """Runs terms. `make_term(api, epoch, raise_epoch)` creates one; `mark` labels the leader's pod.

    `during_term` runs concurrently with a term; its end does not end the term.
    """

    def __init__(
        self,
        api: Api,
        election: Election,
        cache: ClusterCache,
        make_term: Callable[[Api, int, Callable[[int], Awaitable[int]]], LeaderTerm],
        metrics: Metrics,
        mark: LeaderMark | None = None,
        during_term: Callable[[LeaderTerm], Awaitable[None]] | None = None,
    ) -> None:
        self.term: LeaderTerm | None = None
        self._api = api
        self._election = election
        self._cache = cache
        self._make_term = make_term
        self._metrics = metrics
        self._mark = mark
        self._during_term = during_term

    async def run(self) -> None:
        """Lead whenever possible until cancelled, then release the Lease."""
        pause_seconds = PAUSE_SECONDS
        # A replica without a synced cache must not keep others from leading.
        await self._cache.wait_synced()
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
        """Run one term. Returns whether it served until it lost leadership."""
        api = self._api.fenced(self._election.fence)
        term = self.term = self._make_term(api, epoch, self._election.raise_epoch)
        self._metrics.leader.set(1)
        self._metrics.epoch.set(epoch)
        hold = asyncio.create_task(self._election.hold(), name="lease")
        work = asyncio.create_task(term.run(), name="term")
        marking = asyncio.create_task(self._keep_marked(api), name="mark")
        concurrent = asyncio.create_task(self._run_during_term(term), name="during term")
        tasks = (hold, work, marking, concurrent)
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

    async def _run_during_term(self, term: LeaderTerm) -> None:
        if self._during_term is not None:
            await term.ready.wait()  # the resync has priority for the processor
            await self._during_term(term)

    async def _keep_marked(self, api: Api) -> None:
        if self._mark is None:
            return
        pause_seconds = PAUSE_SECONDS
        while True:
            try:
                await self._mark.set(api)
            except ApiError as error:
                log.warning("cannot label the leader's pod, retrying: %s", error)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)
            else:
                pause_seconds = PAUSE_SECONDS
                await asyncio.sleep(MARK_SECONDS)


class LeaderMark:
    """The label of the leader's pod, which no other pod has."""

    def __init__(self, namespace: str, pod: str) -> None:
        self._namespace = namespace
        self._pod = pod

    async def set(self, api: Api) -> None:
        """Move the label to this pod. Does nothing if this pod alone has it."""
        marked = await api.list(PODS, self._namespace, labelSelector=f"{LABEL_LEADER}=true")
        names = {pod["metadata"]["name"] for pod in marked}
        for name in names - {self._pod}:
            await self._write(api, name, None)
        if self._pod not in names:
            await self._write(api, self._pod, "true")

    async def _write(self, api: Api, pod: str, value: str | None) -> None:
        patch = {"metadata": {"labels": {LABEL_LEADER: value}}}
        await api.merge(PODS, pod, patch, self._namespace)


def _failed(work: asyncio.Task[None]) -> bool:
    """Whether the term ended with an error other than the loss of leadership."""
    if work.cancelled():
        return True
    error = work.exception() if work.done() else None
    if isinstance(error, BaseExceptionGroup):
        error = error.split(LeadershipLostError)[1]
    return error is not None and not isinstance(error, LeadershipLostError)


def _log_end(result: object) -> None:
    """Log the error that ended a term."""
    if isinstance(result, BaseExceptionGroup):
        leadership_lost, rest = result.split(LeadershipLostError)
        if leadership_lost is not None:
            log.warning("term ended: %s", leadership_lost.exceptions[0])
        if rest is not None:
            log.error("term failed", exc_info=rest)
    elif isinstance(result, LeadershipLostError):
        log.warning("term ended: %s", result)
    elif isinstance(result, Exception):
        log.error("term failed", exc_info=result)

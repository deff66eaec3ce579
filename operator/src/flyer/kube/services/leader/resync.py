"""Resync of a new leader: outrank all earlier leaders, and observe all their commits.

The watch of jobs may lag. Listing all jobs again takes an API server seconds if they are many, so
the new leader writes its epoch into the status of one job instead: watch events of one kind arrive
in the order of the writes, so once this write is observed, so is every earlier commit. This is the
only write of an epoch alone, one per term. Where it is impossible (no job has a status, or the
watch is broken) the jobs are listed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from flyer.kube.apiserver.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OverloadedError,
)
from flyer.kube.apiserver.resources import FLYERJOBS
from flyer.kube.services.jobs.quota_status import count_zones

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flyer.kube.apiserver import Api
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.job_view import JobView
    from flyer.kube.services.jobs.token import Token

__all__ = ["Resync"]

# The watch reports a write within milliseconds; after this time the jobs are listed.
OBSERVE_SECONDS_MAX: Final = 1.0
# Writes to jobs that change or disappear are retried with other jobs.
TRIES_MAX: Final = 5

log = logging.getLogger(__name__)


class Resync:
    """Resync of one term."""

    def __init__(
        self,
        api: Api,
        cache: ClusterCache,
        token: Token,
        raise_epoch: Callable[[int], Awaitable[int]],
    ) -> None:
        self._api = api
        self._cache = cache
        self._token = token
        self._raise_epoch = raise_epoch

    async def run(self, epoch: int) -> int:
        """Resync. Returns the term's epoch, which may exceed the one from the Lease."""
        await self._cache.wait_synced()
        epoch = await self._outrank(epoch)
        own_write, version = await self._write(epoch)
        if not own_write or not await self._cache.jobs.reach(version, OBSERVE_SECONDS_MAX):
            await self._cache.jobs.refresh()
        if self._highest(but=own_write) >= epoch:
            epoch = await self._outrank(epoch)
        return epoch

    async def _outrank(self, epoch: int) -> int:
        highest = max(self._highest(), await self._token.read())
        if highest >= epoch:
            epoch = await self._raise_epoch(highest + 1)
        zones = count_zones(self._cache.engine_nodes(), self._cache.zones())
        topology = await self._token.open(epoch, zones)
        if topology is not None:
            self._cache.topologies.offer(topology)
        return epoch

    def _highest(self, but: str = "") -> int:
        """The highest epoch in the observed statuses of all jobs except `but`."""
        return max(
            (
                view.job.status.epoch
                for view in self._cache.jobs.values()
                if view.job is not None and view.job.status is not None and view.key != but
            ),
            default=0,
        )

    async def _write(self, epoch: int) -> tuple[str, int]:
        """Write the epoch into a job. Returns its key and the write's version; empty: none."""
        for view in self._newest():
            namespace, _, name = view.key.partition("/")
            # A compare-and-swap: the name may belong to another job, without a status, by now.
            patch = {"metadata": {"resourceVersion": view.version}, "status": {"epoch": epoch}}
            try:
                answer = await self._api.merge(FLYERJOBS, name, patch, namespace, "status")
            except (ConflictError, ForbiddenError, NotFoundError):
                continue  # an admission webhook may protect one job
            except (InvalidError, OverloadedError) as error:
                log.warning("listing all jobs for the resync: %s", error)
                break
            return view.key, int(answer["metadata"]["resourceVersion"])
        return "", 0

    def _newest(self) -> list[JobView]:
        """Jobs with a status, the ones most likely to still exist first."""
        jobs = [
            view for view in self._cache.jobs.values()
            if view.job is not None and view.job.status is not None and not view.deleting
        ]  # fmt: skip
        return sorted(jobs, key=lambda view: -int(view.version or 0))[:TRIES_MAX]

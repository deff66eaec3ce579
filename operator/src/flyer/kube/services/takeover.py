"""Taking over: rank above every leader before, and see all that they committed.

The watch of jobs may be behind. Instead of listing them all again, which takes an API server
seconds when they are many, the new leader writes its epoch into one job's status: events of one
kind come in the order of the writes, so when the watch tells that write it has told every commit
before it. It is the only write of an epoch for its own sake, one a term. Where that is not
possible (nobody has a status yet, or the watch is broken) the jobs are listed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from flyer.kube.client.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OverloadedError,
)
from flyer.kube.client.resources import FLYERJOBS
from flyer.kube.services.counts import count_zones

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flyer.kube.client import Api
    from flyer.kube.services.token import Token
    from flyer.kube.services.views import JobView
    from flyer.kube.services.world import World

__all__ = ["TakeOver"]

# The watch tells a write within milliseconds; a list is the other way.
TELL_SECONDS_MAX: Final = 1.0
# Jobs that change or go while we write to them: others are tried.
TRIES_MAX: Final = 5

log = logging.getLogger(__name__)


class TakeOver:
    """For one term."""

    def __init__(
        self,
        api: Api,
        world: World,
        token: Token,
        raise_epoch: Callable[[int], Awaitable[int]],
    ) -> None:
        self._api = api
        self._world = world
        self._token = token
        self._raise_epoch = raise_epoch

    async def run(self, epoch: int) -> int:
        """The term's epoch, which may be higher than the Lease gave it."""
        await self._world.wait_synced()
        epoch = await self._outrank(epoch)
        written, version = await self._write(epoch)
        if not written or not await self._world.jobs.reach(version, TELL_SECONDS_MAX):
            await self._world.jobs.refresh()
        if self._highest(but=written) >= epoch:
            epoch = await self._outrank(epoch)
        return epoch

    async def _outrank(self, epoch: int) -> int:
        seen = max(self._highest(), await self._token.read())
        if seen >= epoch:
            epoch = await self._raise_epoch(seen + 1)
        zones = count_zones(self._world.engine_nodes(), self._world.zones())
        topology = await self._token.open(epoch, zones)
        if topology is not None:
            self._world.topologies.offer(topology)
        return epoch

    def _highest(self, but: str = "") -> int:
        """The epoch of the latest commit that was seen, to any job but one."""
        return max(
            (
                view.job.status.epoch
                for view in self._world.jobs.values()
                if view.job is not None and view.job.status is not None and view.key != but
            ),
            default=0,
        )

    async def _write(self, epoch: int) -> tuple[str, int]:
        """Write our epoch into a job; which one, and the version of that write. Empty: none."""
        for view in self._newest():
            namespace, _, name = view.key.partition("/")
            # A compare-and-swap: the name may be another job's by now, one without a status.
            patch = {"metadata": {"resourceVersion": view.version}, "status": {"epoch": epoch}}
            try:
                answer = await self._api.merge(FLYERJOBS, name, patch, namespace, "status")
            except (ConflictError, ForbiddenError, NotFoundError):
                continue  # somebody's admission may guard one job
            except (InvalidError, OverloadedError) as error:
                log.warning("the jobs are listed to take over: %s", error)
                break
            return view.key, int(answer["metadata"]["resourceVersion"])
        return "", 0

    def _newest(self) -> list[JobView]:
        """Jobs with a status, those first that are the most likely to be there still."""
        known = [
            view for view in self._world.jobs.values()
            if view.job is not None and view.job.status is not None and not view.deleting
        ]  # fmt: skip
        return sorted(known, key=lambda view: -int(view.version or 0))[:TRIES_MAX]

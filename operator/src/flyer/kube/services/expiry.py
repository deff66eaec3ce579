"""Deletes FlyerJobs that have ended and whose `ttlSecondsAfterFinished` is over.

As Kubernetes' TTL-after-finished controller does for batch/v1 Jobs (KEP-592). Their pods go with
them, by their owner references. A job that still occupies a node is not deleted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from flyer.kube.client.errors import ApiError, NotFoundError
from flyer.kube.client.resources import FLYERJOBS

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.kube.client import Api
    from flyer.kube.services.views import JobView
    from flyer.kube.services.world import World

__all__ = ["Expiry", "expires_at"]

LOOK_SECONDS: Final = 5.0
DELETIONS_MAX: Final = 50
"""In one look: thousands that end together must not take the API server from jobs that start."""

REFUSED_SECONDS: Final = 60.0

log = logging.getLogger(__name__)


def expires_at(view: JobView) -> float | None:
    """When the job may be deleted, in Unix time; None: it stays."""
    job = view.job
    if job is None or job.status is None or view.deleting or not view.forgettable:
        return None
    ttl_seconds = job.spec.ttl_seconds_after_finished
    ends = [
        one.last_transition_time for one in job.status.conditions
        if one.type in ("Complete", "Failed") and one.status == "True"
    ]  # fmt: skip
    if ttl_seconds is None or not ends:
        return None
    return max(ends) + ttl_seconds


class Expiry:
    """Of one term. `now` is the wall clock."""

    def __init__(self, api: Api, world: World, now: Callable[[], float]) -> None:
        self._api = api.apart(asyncio.Semaphore(1))
        self._world = world
        self._now = now
        self._not_before: dict[str, float] = {}  # uids whose deletion was refused

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Delete what is due, the oldest first."""
        now = self._now()
        due = sorted(
            (at, view.key, view.uid) for view in self._world.jobs.values()
            if (at := expires_at(view)) is not None and at <= now
        )  # fmt: skip
        uids = {uid for _, _, uid in due}
        self._not_before = {uid: at for uid, at in self._not_before.items() if uid in uids}
        # A job that cannot be deleted must not keep the others.
        free = [one for one in due if self._not_before.get(one[2], 0.0) <= now]
        for _, key, uid in free[:DELETIONS_MAX]:
            namespace, _, name = key.partition("/")
            try:
                await self._api.delete(FLYERJOBS, name, namespace, uid=uid)
            except NotFoundError:
                continue
            except ApiError as error:
                log.warning("%s has expired and is deleted later: %s", key, error)
                self._not_before[uid] = now + REFUSED_SECONDS

"""Deletes FlyerJobs that have ended: after `ttlSecondsAfterFinished`, or when there are too many.

As Kubernetes' TTL-after-finished controller does for batch/v1 Jobs (KEP-592), and its CronJob
controller for those beyond a history limit. Their pods go with them, by their owner references. A
job that still occupies a node is not deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from flyer.kube.client.errors import ApiError, NotFoundError
from flyer.kube.client.resources import FLYERJOBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flyer.api import FinishedJobs
    from flyer.kube.client import Api
    from flyer.kube.services.views import JobView
    from flyer.kube.services.world import World

__all__ = ["Expiry", "to_delete"]

LOOK_SECONDS: Final = 5.0
DELETIONS_MAX: Final = 50
"""In one look: thousands that end together must not take the API server from jobs that start."""

REFUSED_SECONDS: Final = 60.0

log = logging.getLogger(__name__)


def ended_at(view: JobView) -> float | None:
    """When the job ended, in Unix time; None: it has not, or may not be deleted yet."""
    job = view.job
    if job is None or job.status is None or view.deleting or not view.forgettable:
        return None
    ends = [
        one.last_transition_time for one in job.status.conditions
        if one.type in ("Complete", "Failed") and one.status == "True"
    ]  # fmt: skip
    return max(ends, default=None)


def to_delete(views: Iterable[JobView], limits: FinishedJobs, now: float) -> list[JobView]:
    """The jobs that may be deleted now: the one that ended first is the first."""
    ended = sorted(
        ((at, view.key, view) for view in views if (at := ended_at(view)) is not None),
        key=lambda one: one[:2],
    )
    surplus: dict[str, int] = defaultdict(lambda: -limits.per_namespace)
    for _, key, _ in ended:
        surplus[key.partition("/")[0]] += 1
    due = []
    for at, key, view in ended:
        namespace = key.partition("/")[0]
        ttl_seconds = view.job.spec.ttl_seconds_after_finished if view.job else None
        if ttl_seconds is None:
            ttl_seconds = limits.ttl_seconds
        if surplus[namespace] > 0 or (ttl_seconds is not None and at + ttl_seconds <= now):
            surplus[namespace] -= 1
            due.append(view)
    return due


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
        due = to_delete(self._world.jobs.values(), self._world.finished_jobs(), now)
        uids = {view.uid for view in due}
        self._not_before = {uid: at for uid, at in self._not_before.items() if uid in uids}
        # A job that cannot be deleted must not keep the others.
        free = [view for view in due if self._not_before.get(view.uid, 0.0) <= now]
        for view in free[:DELETIONS_MAX]:
            namespace, _, name = view.key.partition("/")
            try:
                await self._api.delete(FLYERJOBS, name, namespace, uid=view.uid)
            except NotFoundError:
                continue
            except ApiError as error:
                log.warning("%s has ended and is deleted later: %s", view.key, error)
                self._not_before[view.uid] = now + REFUSED_SECONDS

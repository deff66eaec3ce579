"""Deletion of finished FlyerJobs: after `ttlSecondsAfterFinished`, or beyond a history limit.

As Kubernetes' TTL-after-finished controller does for batch/v1 Jobs (KEP-592), and its CronJob
controller for jobs beyond a history limit. Garbage collection deletes their pods through the owner
references. A job that still occupies a node is not deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from flyer.kube.apiserver.errors import ApiError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flyer.api import FinishedJobs
    from flyer.kube.apiserver import Api
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.job_view import JobView

__all__ = ["Expiry", "to_delete"]

CHECK_SECONDS: Final = 5.0
DELETIONS_MAX: Final = 50
"""Deletions per tick, so that thousands of finished jobs do not delay starting ones."""

REFUSED_SECONDS: Final = 60.0

log = logging.getLogger(__name__)


def ended_at(view: JobView) -> float | None:
    """The Unix time at which the job ended; None: it has not, or may not be deleted yet."""
    job = view.job
    if job is None or job.status is None or view.deleting or not view.forgettable:
        return None
    ends = [
        condition.last_transition_time for condition in job.status.conditions
        if condition.type in ("Complete", "Failed") and condition.status == "True"
    ]  # fmt: skip
    return max(ends, default=None)


def to_delete(views: Iterable[JobView], limits: FinishedJobs, now: float) -> list[JobView]:
    """The jobs that may be deleted now, ordered by the time at which they ended."""
    ended = sorted(
        ((at, view.key, view) for view in views if (at := ended_at(view)) is not None),
        key=lambda entry: entry[:2],
    )
    surplus: dict[str, int] = defaultdict(lambda: -limits.per_namespace)
    for _, key, _ in ended:
        surplus[key.partition("/")[0]] += 1
    expired = []
    for at, key, view in ended:
        namespace = key.partition("/")[0]
        ttl_seconds = view.job.spec.ttl_seconds_after_finished if view.job else None
        if ttl_seconds is None:
            ttl_seconds = limits.ttl_seconds
        if surplus[namespace] > 0 or (ttl_seconds is not None and at + ttl_seconds <= now):
            surplus[namespace] -= 1
            expired.append(view)
    return expired


class Expiry:
    """Deletes finished jobs during one term. `now` is the wall clock."""

    def __init__(self, api: Api, cache: ClusterCache, now: Callable[[], float]) -> None:
        self._api = api.with_limiter(asyncio.Semaphore(1))
        self._cache = cache
        self._now = now
        self._not_before: dict[str, float] = {}  # uid → retry time after a refused deletion

    async def run(self) -> None:
        """Delete until cancelled."""
        while True:
            await self.delete_expired()
            await asyncio.sleep(CHECK_SECONDS)

    async def delete_expired(self) -> None:
        """Delete the expired jobs, the oldest first."""
        now = self._now()
        expired = to_delete(self._cache.jobs.values(), self._cache.finished_jobs(), now)
        uids = {view.uid for view in expired}
        self._not_before = {uid: at for uid, at in self._not_before.items() if uid in uids}
        # A job that cannot be deleted must not block the others.
        due = [view for view in expired if self._not_before.get(view.uid, 0.0) <= now]
        for view in due[:DELETIONS_MAX]:
            namespace, _, name = view.key.partition("/")
            try:
                await self._api.delete(FLYERJOBS, name, namespace, uid=view.uid)
            except NotFoundError:
                continue
            except ApiError as error:
                log.warning("cannot delete finished job %s, retrying later: %s", view.key, error)
                self._not_before[view.uid] = now + REFUSED_SECONDS

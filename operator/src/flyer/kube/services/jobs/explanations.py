"""Statuses that only explain why jobs wait: stored by a separate task, which delays no decision.

Thousands of jobs submitted at once have thousands of pending reasons, and each costs a write. The
engine proceeds as if they were stored, because no decision depends on them: if a leader dies before
writing one, the next leader writes it. Every status that assigns or releases nodes is stored before
it is acted on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from flyer.kube.apiserver.errors import OverloadedError, UnreachableError
from flyer.kube.services.errors import QuarantinedError, StaleStateError
from flyer.kube.services.jobs.commits import BACKGROUND_WRITES_MAX, QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flyer.api import FlyerJobStatus
    from flyer.engine import Commit
    from flyer.kube.services.jobs.commits import Commits

__all__ = ["Explanations", "only_explains"]

PAUSE_SECONDS: Final = 0.1
PAUSE_SECONDS_MAX: Final = 10.0

log = logging.getLogger(__name__)


class Explanations:
    """The latest explanation of each job. A newer one replaces it in the queue.

    `vanished(job, uid)` is called for a job whose object is gone; `request_rebuild(why)` when
    another writer changed a status.
    """

    def __init__(
        self,
        commits: Commits,
        uid_of: Callable[[str], str | None],
        *,
        vanished: Callable[[str, str], None],
        request_rebuild: Callable[[str], None],
    ) -> None:
        self._commits = commits
        self._uid_of = uid_of
        self._vanished = vanished
        self._request_rebuild = request_rebuild
        self._deferred: dict[str, Commit] = {}
        self._under_way: dict[str, Commit] = {}  # being stored, unless superseded by a decision
        self._available = asyncio.Event()  # set while explanations are deferred
        self._pause_seconds = PAUSE_SECONDS

    def __len__(self) -> int:
        """Number of explanations that are not being stored yet."""
        return len(self._deferred)

    def defer(self, commits: Iterable[Commit]) -> list[Commit]:
        """Defer the commits that only explain. Returns the other commits."""
        urgent = []
        for commit in commits:
            # The newer status contains what the deferred one reports.
            if only_explains(self._commits.stored(commit.job), commit.status):
                self._deferred[commit.job] = commit
                self._available.set()
            else:
                self.forget(commit.job)
                urgent.append(commit)
        return urgent

    async def run(self) -> None:
        """Store explanations until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(BACKGROUND_WRITES_MAX):
                group.create_task(self._work(), name=f"explanations-{number}")

    async def _work(self) -> None:
        while True:
            await self._available.wait()
            async with self._commits.background:
                # Taken inside the limiter: a decision made meanwhile supersedes it and is stored
                # first.
                commit = self._next()
                failed = commit is not None and not await self._store(commit)
            if failed:
                await asyncio.sleep(self._pause_seconds)
                self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
            elif commit is not None:
                self._pause_seconds = PAUSE_SECONDS
                await self._commits.wait_observed(commit.job)

    def _next(self) -> Commit | None:
        job = next(iter(self._deferred), None)
        if job is None:
            self._available.clear()
            return None
        return self._deferred.pop(job)

    async def _store(self, commit: Commit) -> bool:
        """Store an explanation. False: the API server is unavailable, and it is retried later."""
        job, uid = commit.job, self._uid_of(commit.job)
        if uid is None:
            return True  # the job is being removed from the engine
        self._under_way[job] = commit
        try:
            stored = await self._commits.explain(commit)
            if not stored and self._under_way.get(job) is commit and self._uid_of(job) == uid:
                self._vanished(job, uid)
        except QuarantinedError:
            pass  # the next step removes the job
        except StaleStateError as error:
            self._request_rebuild(str(error))
        except (OverloadedError, UnreachableError) as error:
            log.warning("%s: cannot store its pending reason yet: %s", job, error)
            if self._under_way.get(job) is commit:
                self._deferred.setdefault(job, commit)
                self._available.set()
            return False
        finally:
            if self._under_way.get(job) is commit:
                del self._under_way[job]
        return True

    def forget(self, job: str) -> None:
        """The engine has forgotten the job or made a decision about it."""
        self._deferred.pop(job, None)
        self._under_way.pop(job, None)

    def clear(self) -> None:
        """The engine was rebuilt from the stored statuses."""
        self._deferred.clear()
        self._under_way.clear()


def only_explains(before: FlyerJobStatus | None, after: FlyerJobStatus) -> bool:
    """Whether the new status changes only the explanation of a job that waits as before."""
    if not after.phase.idle:
        return False
    if after.occupied or after.assignment is not None:
        return False
    if before is None:  # a leader that reads the job without a status decides the same
        return after.history.attempt == 0 and after.eviction is None
    if before.condition(QUARANTINED) is not None:
        return False  # the condition is removed immediately, by this or another write
    return _without_reasons(before) == _without_reasons(after)


def _without_reasons(status: FlyerJobStatus) -> FlyerJobStatus:
    return status.replace(
        epoch=0, reason="", message="", pending=None, conditions=(), observed_generation=None
    )

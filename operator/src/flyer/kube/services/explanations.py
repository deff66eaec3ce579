"""Statuses that only report why jobs wait: stored by a separate task, which delays no decision.

Thousands of jobs that are submitted at once have thousands of reasons, and each is a write. The
engine decides as if they were stored, for nothing depends on them: a leader that never comes to
write them costs a text, which the next one writes. Whatever gives nodes out or takes them back is
stored before it is done, as ever.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from flyer.api import Phase
from flyer.kube.client.errors import OverloadedError, UnreachableError
from flyer.kube.services.commits import QUARANTINED, UNHURRIED
from flyer.kube.services.errors import LeftAloneError, StaleStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flyer.api import FlyerJobStatus
    from flyer.engine import Commit
    from flyer.kube.services.commits import Commits

__all__ = ["Explanations", "only_explains"]

PAUSE_SECONDS: Final = 0.1
PAUSE_SECONDS_MAX: Final = 10.0

log = logging.getLogger(__name__)


class Explanations:
    """The latest one of each job. A job keeps its place when it gets a newer one.

    `gone(job)` is called for a job whose object is gone; `confused(why)` where somebody else wrote.
    """

    def __init__(
        self,
        commits: Commits,
        uid_of: Callable[[str], str | None],
        *,
        gone: Callable[[str], None],
        confused: Callable[[str], None],
    ) -> None:
        self._commits = commits
        self._uid_of = uid_of
        self._gone = gone
        self._confused = confused
        self._kept: dict[str, Commit] = {}
        self._under_way: dict[str, Commit] = {}  # the latest, unless something was decided since
        self._some = asyncio.Event()  # set while some are kept
        self._pause_seconds = PAUSE_SECONDS

    def __len__(self) -> int:
        """How many are not being stored yet."""
        return len(self._kept)

    def put_aside(self, commits: Iterable[Commit]) -> list[Commit]:
        """Keep those that only explain; the others."""
        now = []
        for commit in commits:
            # The new one says what the kept one said.
            if only_explains(self._commits.stored(commit.job), commit.status):
                self._kept[commit.job] = commit
                self._some.set()
            else:
                self.forgotten(commit.job)
                now.append(commit)
        return now

    async def run(self) -> None:
        """Store them, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(UNHURRIED):
                group.create_task(self._work(), name=f"explanations-{number}")

    async def _work(self) -> None:
        while True:
            await self._some.wait()
            async with self._commits.unhurried:
                # Taken only now: what was decided meanwhile has replaced it, and is written first.
                commit = self._next()
                failed = commit is not None and not await self._store(commit)
            if failed:
                await asyncio.sleep(self._pause_seconds)
                self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
            elif commit is not None:
                self._pause_seconds = PAUSE_SECONDS
                await self._commits.heard(commit.job)

    def _next(self) -> Commit | None:
        job = next(iter(self._kept), None)
        if job is None:
            self._some.clear()
            return None
        return self._kept.pop(job)

    async def _store(self, commit: Commit) -> bool:
        """Whether the API server works. What it does not take now is tried again in its turn."""
        job, uid = commit.job, self._uid_of(commit.job)
        if uid is None:
            return True  # it is being taken out of the engine
        self._under_way[job] = commit
        try:
            stored = await self._commits.explain(commit)
            if not stored and self._under_way.get(job) is commit and self._uid_of(job) == uid:
                self._gone(job)
        except LeftAloneError:
            pass  # the next step takes the job out
        except StaleStateError as error:
            self._confused(str(error))
        except (OverloadedError, UnreachableError) as error:
            log.warning("%s: why it waits is not stored yet: %s", job, error)
            if self._under_way.get(job) is commit:
                self._kept.setdefault(job, commit)
                self._some.set()
            return False
        finally:
            if self._under_way.get(job) is commit:
                del self._under_way[job]
        return True

    def forgotten(self, job: str) -> None:
        """The engine has forgotten a job, or decided something about it."""
        self._kept.pop(job, None)
        self._under_way.pop(job, None)

    def clear(self) -> None:
        """The engine was rebuilt from what is stored."""
        self._kept.clear()
        self._under_way.clear()


def only_explains(before: FlyerJobStatus | None, after: FlyerJobStatus) -> bool:
    """Whether a job's status says no more than that it waits, as it did, and why."""
    if after.phase not in (Phase.QUEUED, Phase.SUSPENDED):
        return False
    if after.occupied or after.assignment is not None:
        return False
    if before is None:  # whoever reads the job anew decides the same
        return after.chain.attempt == 0 and after.eviction is None
    if before.condition(QUARANTINED) is not None:
        return False  # the condition is removed at once, by this write or by another one
    return _without_reasons(before) == _without_reasons(after)


def _without_reasons(status: FlyerJobStatus) -> FlyerJobStatus:
    return status.replace(
        epoch=0, reason="", message="", pending=None, conditions=(), observed_generation=None
    )

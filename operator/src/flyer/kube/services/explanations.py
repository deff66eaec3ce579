"""Statuses that only say why jobs wait: stored while nothing else is to be decided.

Thousands of jobs that are submitted at once have thousands of reasons, and each is a write. The
engine decides as if they were stored, for nothing depends on them: a leader that never comes to
write them costs a text, which the next one writes. Whatever gives nodes out or takes them back is
stored before it is done, as ever.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.kube.services.commits import AT_ONCE, QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.api import FlyerJobStatus
    from flyer.engine import Commit
    from flyer.kube.services.commits import Commits

__all__ = ["Explanations", "only_explains"]


class Explanations:
    """The latest one of each job. A job keeps its place when it gets a newer one."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self._kept: dict[str, Commit] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def put_aside(self, commits: Iterable[Commit]) -> list[Commit]:
        """Keep those that only explain; the others."""
        now = []
        for commit in commits:
            # The new one says what the kept one said.
            if only_explains(self._commits.stored(commit.job), commit.status):
                self._kept[commit.job] = commit
            else:
                self._kept.pop(commit.job, None)
                now.append(commit)
        return now

    async def store_some(self) -> set[str]:
        """Store as many as are under way together; the jobs that are gone."""
        some = list(islice(self._kept.values(), AT_ONCE))
        for commit in some:
            del self._kept[commit.job]
        gone: set[str] = set()
        await self._commits.store(some, gone, urgent=False)
        return gone

    def forgotten(self, job: str) -> None:
        """The engine has forgotten a job."""
        self._kept.pop(job, None)

    def clear(self) -> None:
        """The engine was rebuilt from what is stored."""
        self._kept.clear()


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

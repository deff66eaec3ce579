"""What a job's status and events say of jobs in other namespaces: that there are some, no more.

The engine explains its decisions with the names of jobs. Whoever may read one job may not read all
others, so names of other namespaces are left out of everything that is stored with a job or sent to
it. `flyer why` gives them to users who may list all jobs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.api import FlyerJobStatus

__all__ = ["ANOTHER", "Privacy"]

ANOTHER: Final = "another job"
_NAME: Final = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"
# A job's key, and the user that sentences name after it.
_KEY: Final = re.compile(rf"(?<![\w/.-])({_NAME})/({_NAME})(?![\w/-])( of [^\s,;()]+)?")


class Privacy:
    """`is_job(key)` says whether there is, or was just now, a job of that key."""

    def __init__(self, is_job: Callable[[str], bool]) -> None:
        self._is_job = is_job

    def words(self, words: str, job: str) -> str:
        """A sentence for whoever may read this job."""
        own = job.partition("/")[0]

        def replaced(match: re.Match[str]) -> str:
            namespace, name = match[1], match[2]
            foreign = namespace != own and self._is_job(f"{namespace}/{name}")
            return ANOTHER if foreign else match[0]

        return _KEY.sub(replaced, words) if "/" in words else words

    def status(self, status: FlyerJobStatus, job: str) -> FlyerJobStatus:
        """A status without the names of others."""
        own = job.partition("/")[0]
        changes: dict[str, object] = {"message": self.words(status.message, job)}
        if status.pending is not None:
            blocked_by = tuple(
                key for key in status.pending.blocked_by if key.partition("/")[0] == own
            )
            message = self.words(status.pending.message, job)
            changes["pending"] = status.pending.replace(message=message, blocked_by=blocked_by)
        if status.suspension is not None:
            one = status.suspension
            changes["suspension"] = one.replace(
                message=self.words(one.message, job), by=self.words(one.by, job)
            )
        if status.eviction is not None:
            gone = status.eviction
            changes["eviction"] = gone.replace(
                message=self.words(gone.message, job), by=self.words(gone.by, job)
            )
        changes["conditions"] = tuple(
            one.replace(message=self.words(one.message, job)) for one in status.conditions
        )
        return status.replace(**changes)

"""What a job's status and events say of jobs in other namespaces: that there are some, no more.

The engine explains its decisions with the names of jobs. Whoever may read one job may not read all
others, so names of other namespaces are left out of everything that is stored with a job or sent to
it, `flyer why` included. Who may list all jobs sees who has the nodes in `flyer nodes`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from flyer.api.status import BY_CHARS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from flyer.api import FlyerJobStatus, Pending

__all__ = ["ANOTHER", "Privacy"]

ANOTHER: Final = "another job"
_NAME: Final = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"
# The user that sentences name after a job: up to the words that follow, for a name may have spaces.
_USER: Final = (
    rf"[^;\n]{{1,{BY_CHARS_MAX}}}?(?= (?:has|holds|is leaving)\b| \(priority )|[^\s,;()]+"
)
_KEY: Final = re.compile(rf"(?<![\w/.-])({_NAME})/({_NAME})(?![\w/-])(?: of (?:{_USER}))?")


class Privacy:
    """`is_job(key)` says whether there is, or was just now, a job of that key."""

    def __init__(self, is_job: Callable[[str], bool]) -> None:
        self._is_job = is_job

    def words(self, words: str, job: str, named: AbstractSet[str] = frozenset()) -> str:
        """A sentence for whoever may read this job. `named`: jobs that it is known to name."""
        own = job.partition("/")[0]

        def replaced(match: re.Match[str]) -> str:
            key = f"{match[1]}/{match[2]}"
            foreign = match[1] != own and (key in named or self._is_job(key))
            return ANOTHER if foreign else match[0]

        return _KEY.sub(replaced, words) if "/" in words else words

    def status(self, status: FlyerJobStatus, job: str) -> FlyerJobStatus:
        """A status without the names of others."""
        # What was written a while ago may name jobs that are gone by now.
        named = set(_named(status))
        changes: dict[str, object] = {"message": self.words(status.message, job, named)}
        if status.pending is not None:
            changes["pending"] = self._pending(status.pending, job, named)
        for field in ("suspension", "eviction"):
            one = getattr(status, field)
            if one is not None:
                changes[field] = one.replace(
                    message=self.words(one.message, job, named),
                    by=self.words(one.by, job, named),
                )
        changes["conditions"] = tuple(
            one.replace(message=self.words(one.message, job, named)) for one in status.conditions
        )
        return status.replace(**changes)

    def _pending(self, pending: Pending, job: str, named: AbstractSet[str]) -> Pending:
        own = job.partition("/")[0]

        def of_own(key: str) -> bool:
            return key.partition("/")[0] == own

        reasons = []
        for one in pending.reasons:
            message = self.words(one.message, job, named)
            hidden = {} if not one.job or of_own(one.job) else {"job": "", "user": ""}
            reasons.append(one.replace(message=message, **hidden))
        return pending.replace(
            message=self.words(pending.message, job, named),
            blocked_by=tuple(key for key in pending.blocked_by if of_own(key)),
            reasons=tuple(reasons),
            # Nobody may suspend the jobs of others.
            unblock=tuple(
                one
                for one in pending.unblock
                if one.node or self.words(one.command, job, named) == one.command
            ),
        )


def _named(status: FlyerJobStatus) -> Iterator[str]:
    """The jobs that the status names in a field of its own."""
    if status.pending is not None:
        yield from status.pending.blocked_by
        yield from (one.job for one in status.pending.reasons)
    # The user or the job that asked; only a preemption is asked by another job.
    for one in (status.suspension, status.eviction):
        if one is not None and one.reason == "Preempted":
            yield one.by

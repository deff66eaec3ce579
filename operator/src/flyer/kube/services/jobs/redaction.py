"""Redaction of job names: statuses and events do not name jobs of other namespaces.

The engine explains its decisions with the names of jobs. A user who may read one job may not be
allowed to read all others, so names from other namespaces are removed from everything that is
stored with a job or sent to it, including `flyer why`. A user who may list all jobs sees the owners
of nodes in `flyer nodes`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from flyer.api.limits import BY_CHARS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from flyer.api import FlyerJobStatus, Pending

__all__ = ["ANOTHER", "Redactor"]

ANOTHER: Final = "another job"
_NAME: Final = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"
# The user named after a job: up to the words that follow, because a name may contain spaces.
_USER: Final = (
    rf"[^;\n]{{1,{BY_CHARS_MAX}}}?(?= (?:has|holds|is leaving)\b| \(priority )|[^\s,;()]+"
)
_KEY: Final = re.compile(rf"(?<![\w/.-])({_NAME})/({_NAME})(?![\w/-])(?: of (?:{_USER}))?")


class Redactor:
    """Removes foreign job names. `is_job(key)`: a job of that key exists or existed recently."""

    def __init__(self, is_job: Callable[[str], bool]) -> None:
        self._is_job = is_job

    def redact(self, text: str, job: str, named: AbstractSet[str] = frozenset()) -> str:
        """Redact a text for readers of this job. `named`: jobs that the text is known to name."""
        own = job.partition("/")[0]

        def replaced(match: re.Match[str]) -> str:
            key = f"{match[1]}/{match[2]}"
            foreign = match[1] != own and (key in named or self._is_job(key))
            return ANOTHER if foreign else match[0]

        return _KEY.sub(replaced, text) if "/" in text else text

    def redact_status(self, status: FlyerJobStatus, job: str) -> FlyerJobStatus:
        """Redact a status for readers of this job."""
        # An older text may name jobs that are gone by now.
        named = set(_named(status))
        changes: dict[str, object] = {"message": self.redact(status.message, job, named)}
        if status.pending is not None:
            changes["pending"] = self._pending(status.pending, job, named)
        for field in ("suspension", "eviction"):
            record = getattr(status, field)
            if record is not None:
                changes[field] = record.replace(
                    message=self.redact(record.message, job, named),
                    by=self.redact(record.by, job, named),
                )
        changes["conditions"] = tuple(
            condition.replace(message=self.redact(condition.message, job, named))
            for condition in status.conditions
        )
        return status.replace(**changes)

    def _pending(self, pending: Pending, job: str, named: AbstractSet[str]) -> Pending:
        own = job.partition("/")[0]

        def is_own(key: str) -> bool:
            return key.partition("/")[0] == own

        reasons = []
        for reason in pending.reasons:
            message = self.redact(reason.message, job, named)
            hidden = {} if not reason.job or is_own(reason.job) else {"job": "", "user": ""}
            reasons.append(reason.replace(message=message, **hidden))
        return pending.replace(
            message=self.redact(pending.message, job, named),
            blocked_by=tuple(key for key in pending.blocked_by if is_own(key)),
            reasons=tuple(reasons),
            # A user cannot suspend jobs of other namespaces.
            unblock=tuple(
                unblock
                for unblock in pending.unblock
                if unblock.node or self.redact(unblock.command, job, named) == unblock.command
            ),
        )


def _named(status: FlyerJobStatus) -> Iterator[str]:
    """The jobs that the status names in dedicated fields."""
    if status.pending is not None:
        yield from status.pending.blocked_by
        yield from (reason.job for reason in status.pending.reasons)
    # `by` is the requesting user or job; only a preemption is requested by a job.
    for record in (status.suspension, status.eviction):
        if record is not None and record.reason == "Preempted":
            yield record.by

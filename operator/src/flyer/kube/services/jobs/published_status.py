"""Published statuses: without names of jobs in other namespaces, with kubectl commands.

The engine explains its decisions with the names of jobs. A user who may read one job may not be
allowed to read all others, so names from other namespaces are removed from everything that is
stored with a job or sent to it, including `flyer why`. A user who may list all jobs sees the owners
of nodes in `flyer nodes`.

The engine knows that a node is unavailable and why. The command that returns it depends on the
driver, so the Kubernetes driver adds it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from flyer.api.limits import BY_CHARS_MAX
from flyer.kube.cache.node_view import CORDONED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from flyer.api import FlyerJobStatus, NodeHealth, Pending, Unblock
    from flyer.engine import Commit, EngineState, NodeState
    from flyer.kube.apiserver import Cache

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

    def publish(
        self, commit: Commit, state: EngineState, healths: Cache[NodeHealth | None]
    ) -> Commit:
        """The commit as it is stored."""
        status = self.redact_status(commit.status, commit.job)
        status = _with_unblock_commands(status, state.nodes.get, lambda name: healths.get("", name))
        return replace(commit, status=status)

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
        # An older text may name jobs that no longer exist.
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


def _with_unblock_commands(
    status: FlyerJobStatus,
    node_of: Callable[[str], NodeState | None],
    health_of: Callable[[str], NodeHealth | None],
) -> FlyerJobStatus:
    """The status with a command for each node that would let the job start."""
    pending = status.pending
    if pending is None or not any(unblock.node for unblock in pending.unblock):
        return status
    unblock = tuple(
        _with_command(each, node_of(each.node), health_of(each.node)) for each in pending.unblock
    )
    return status.replace(pending=pending.replace(unblock=unblock))


def _with_command(unblock: Unblock, state: NodeState | None, health: NodeHealth | None) -> Unblock:
    if not unblock.node or state is None:
        return unblock
    command, effect = _unblock_command(state, health)
    return unblock.replace(command=command, effect=effect)


def _unblock_command(state: NodeState, health: NodeHealth | None) -> tuple[str, str]:
    """The command for a node that gets no new work, and its effect."""
    name = state.node.name
    why = state.lost or state.node.reason or state.out or state.node.unproven
    if why == CORDONED:
        return f"kubectl uncordon {name}", f"makes {name} schedulable again"
    if health is None or health.unfit != why:
        return f"kubectl describe node {name}", f"shows details of {name}: {why}"
    if health.spec.drain is None:
        return f"kubectl describe nodehealth {name}", f"shows details of {name}: {why}"
    patch = '{"spec":{"drain":null}}'
    return (
        f"kubectl patch nodehealth {name} --type=merge -p '{patch}'",
        f"makes {name} schedulable again: {why}",
    )

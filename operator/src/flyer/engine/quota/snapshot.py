"""Snapshot of quotas: the nodes that jobs hold, and the limits that are full.

A quota applies to a job if subject, priority and class match; `*` matches any. A quota that names
its subject replaces the one with `*` of the same kind, priority and class, but never one with scope
Total. All quotas that apply must have room for the whole gang. A job holds its assignment and nodes
that it has not left yet, at the priority at which it got them. Each step builds the snapshot anew,
from statuses alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.api import Pending, Priority
from flyer.api.waiting import WAITING_FOR_QUOTA
from flyer.engine.state.explanation import Blocker
from flyer.engine.state.jobs import HOLDING, JobState
from flyer.engine.state.quotas import ANY, Holding, Quota, Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.engine.state.cycle_state import CycleState


# Holders named in one message; others are counted.
_HOLDERS_MAX = 4
_BLOCKED_BY_MAX = 32  # names in `status.pending.blockedBy`


@dataclass(slots=True)
class QuotaSnapshot:
    """Usage of all quotas within a scheduling pass, which updates it."""

    quotas: tuple[Quota, ...]
    holdings: dict[str, Holding] = field(default_factory=dict)
    # Team of each namespace that has one.
    teams: Mapping[str, str] = field(default_factory=dict)
    # Nodes by account, and the quotas that apply by subjects, priority and class.
    _used: dict[tuple[str, str], int] = field(default_factory=dict)
    _limits: dict[tuple[Subjects, Priority, str | None], list[Quota]] = field(default_factory=dict)
    # The first job that waits for room in an account; later jobs wait behind it.
    _waiting: dict[tuple[str, str], str] = field(default_factory=dict)

    def limits(self, subjects: Subjects, priority: Priority, node_class: str | None) -> list[Quota]:
        """The quotas that apply, the narrowest first, then the smallest."""
        key = (subjects, priority, node_class)
        if key not in self._limits:
            matches = [
                quota for quota in self.quotas if quota.applies(subjects, priority, node_class)
            ]
            own = {
                (match.kind, match.priority, match.node_class)
                for match in matches
                if match.subject != ANY
            }
            applicable = [
                match
                for match in matches
                if match.total
                or match.subject != ANY
                or (match.kind, match.priority, match.node_class) not in own
            ]
            self._limits[key] = sorted(
                applicable, key=lambda limit: (limit.width, limit.nodes, limit.name)
            )
        return self._limits[key]

    def subjects(self, job: JobState) -> Subjects:
        """The subjects of the job."""
        return subjects_of(job, self.teams)

    def hold(self, holding: Holding) -> None:
        """Set what a job holds."""
        before = self.holdings.get(holding.job)
        for usage, nodes in ((before, -before.nodes if before else 0), (holding, holding.nodes)):
            if usage is None:
                continue
            for quota in self._limits_of(usage):
                key = quota.account(usage.subjects)
                self._used[key] = self._used.get(key, 0) + nodes
        self.holdings[holding.job] = holding

    def used(self, quota: Quota, subjects: Subjects, *, but: str = "") -> int:
        """Nodes held in the account of these subjects, except by the job `but`."""
        account = quota.account(subjects)
        nodes = self._used.get(account, 0)
        own = self.holdings.get(but)
        if (
            own is not None
            and quota.account(own.subjects) == account
            and quota in self._limits_of(own)
        ):
            nodes -= own.nodes
        return nodes

    def holders(self, quota: Quota, subjects: Subjects | None = None) -> list[Holding]:
        """The jobs that hold nodes in this account, or under the quota, the largest first."""
        account = quota.account(subjects) if subjects is not None else None
        holders_of_quota = [
            holding
            for holding in self.holdings.values()
            if account in (None, quota.account(holding.subjects))
            and quota in self._limits_of(holding)
        ]
        return sorted(holders_of_quota, key=lambda holder: (-holder.nodes, holder.job))

    def _limits_of(self, holding: Holding) -> list[Quota]:
        return self.limits(holding.subjects, holding.priority, holding.node_class)

    def first_full_quota(
        self, job: JobState, priority: Priority, node_class: str | None
    ) -> Quota | None:
        """The first quota without room for the job, or in which an earlier job waits."""
        subjects = self.subjects(job)
        for quota in self.limits(subjects, priority, node_class):
            if self._waiting.get(quota.account(subjects), job.key) != job.key:
                return quota
            if self.used(quota, subjects, but=job.key) + job.spec.nodes > quota.nodes:
                return quota
        return None

    def charge(self, job: JobState, priority: Priority, node_class: str | None) -> None:
        """Count the nodes that the job has or will have next."""
        self.hold(Holding(job.key, self.subjects(job), priority, node_class, job.spec.nodes))

    def wait_in(self, quota: Quota, job: JobState) -> None:
        """Let later jobs of the same account wait behind this one in the quota."""
        self._waiting.setdefault(quota.account(self.subjects(job)), job.key)

    def out_of_quota(self, job: JobState, quota: Quota) -> tuple[Pending, list[Blocker]]:
        """Why the job waits for room: the quota, its use, and the jobs that hold nodes."""
        subjects = self.subjects(job)
        holders = [holder for holder in self.holders(quota, subjects) if holder.job != job.key]
        used_nodes = sum(holder.nodes for holder in holders)
        ahead = self._waiting.get(quota.account(subjects), job.key)
        named = ", ".join(f"{holder.job} ({holder.nodes})" for holder in holders[:_HOLDERS_MAX])
        if len(holders) > _HOLDERS_MAX:
            named += f" and {len(holders) - _HOLDERS_MAX} more jobs"
        remaining = max(0, quota.nodes - used_nodes)
        message = (
            f"quota {quota.name} has {remaining} of {quota.nodes} nodes left for "
            f"{quota.subject_name(subjects)}, wants {job.spec.nodes}"
        )
        message += f": {used_nodes} used by {named}" if holders else ""
        blockers = [Blocker(WAITING_FOR_QUOTA, message, user=job.user, until=quota.expires_at)]
        blockers += [
            Blocker(
                WAITING_FOR_QUOTA,
                f"{holder.job} of {holder.subjects.user} holds {holder.nodes} "
                f"of quota {quota.name}",
                job=holder.job, user=holder.subjects.user,
            )
            for holder in holders
        ]  # fmt: skip
        if ahead != job.key:
            text = f"{ahead} is ahead in quota {quota.name}"
            message += f"; {text}"
            blockers.append(Blocker(WAITING_FOR_QUOTA, text, job=ahead, user=job.user))
        blocked_by = tuple(dict.fromkeys(blocker.job for blocker in blockers if blocker.job))[
            :_BLOCKED_BY_MAX
        ]
        return Pending(reason=WAITING_FOR_QUOTA, message=message, blocked_by=blocked_by), blockers


def quota_snapshot(cycle: CycleState) -> QuotaSnapshot:
    """The usage of the quotas that have not expired. The next expiry causes a step."""
    snapshot = QuotaSnapshot(active_quotas(cycle), teams=cycle.teams)
    if not snapshot.quotas:
        return snapshot  # without quotas nothing is counted
    for job in cycle.active_jobs().values():
        holding = holding_of(cycle, job)
        if holding is not None:
            snapshot.hold(holding)
    for holding in cycle.quarantined:
        snapshot.hold(holding)
    return snapshot


def subjects_of(job: JobState, teams: Mapping[str, str]) -> Subjects:
    """The subjects of a job."""
    namespace = job.key.partition("/")[0]
    return Subjects(job.user, namespace, teams.get(namespace, ""), job.queue)


def active_quotas(cycle: CycleState) -> tuple[Quota, ...]:
    """The quotas that have not expired, by name."""
    quotas = []
    for quota in cycle.quotas.values():
        if quota.expires_at is not None:
            if quota.expires_at <= cycle.now:
                continue
            cycle.wake(quota.expires_at)
        quotas.append(quota)
    return tuple(sorted(quotas, key=lambda quota: quota.name))


def holding_of(cycle: CycleState, job: JobState) -> Holding | None:
    """Usage that the job has until its nodes are empty."""
    status = job.status
    nodes = sum(not cycle.has_left(job, node.name) for node in status.occupied)
    if status.phase in HOLDING and status.assignment is not None:
        nodes = max(nodes, len(status.assignment.nodes))
    if nodes == 0:
        return None
    subjects = subjects_of(job, cycle.teams)
    return Holding(job.key, subjects, _held_priority(cycle, job), _class_of(cycle, job), nodes)


def _held_priority(cycle: CycleState, job: JobState) -> Priority:
    """The priority at which a job holds its nodes."""
    if job.status.priority is not None:
        return job.status.priority
    return _default_priority(cycle, job.spec.priority)


def _default_priority(cycle: CycleState, priority: Priority) -> Priority:
    return cycle.settings.auto_priority if priority is Priority.AUTO else priority


def _class_of(cycle: CycleState, job: JobState) -> str | None:
    status = job.status
    if status.assignment is not None and status.assignment.node_class:
        return status.assignment.node_class
    if job.spec.node_class is not None:
        return job.spec.node_class
    names = status.assignment.names if status.assignment is not None else ()
    for name in (*names, *(node.name for node in status.occupied)):
        if name in cycle.nodes:
            return cycle.nodes[name].node.node_class
    return None


__all__ = ["QuotaSnapshot", "active_quotas", "holding_of", "quota_snapshot", "subjects_of"]

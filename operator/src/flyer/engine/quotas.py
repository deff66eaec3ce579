"""Quotas: who may hold how many nodes, at which priority, of which class.

A limit applies to a job if user, priority and class match; `*` matches any. A limit that names the
user stands in for the one with `user: "*"` of the same priority and class. All limits that apply
must have room for the whole gang. What a job holds (its assignment, and nodes it has still to
leave) counts at the priority at which it got it. The ledger is made anew in each step, from
statuses alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.api import Pending, Priority
from flyer.api.waiting import WAITING_FOR_QUOTA
from flyer.engine.explanation import Blocker
from flyer.engine.state import HOLDING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flyer.api import FlyerQuota
    from flyer.engine.draft import Draft
    from flyer.engine.state import JobState

ANY = "*"
# Holders named in one sentence; the rest is counted.
_HOLDERS_MAX = 4


@dataclass(frozen=True, slots=True)
class Quota:
    """One limit."""

    name: str
    user: str = ANY
    priority: str = ANY
    group: str = ANY
    nodes: int = 0
    expires_at: float | None = None

    @classmethod
    def of(cls, quota: FlyerQuota) -> Quota:
        """What the object says."""
        spec = quota.spec
        return cls(
            quota.metadata.name, spec.user, spec.priority, spec.group, spec.nodes, spec.expires_at
        )

    def applies(self, user: str, priority: Priority, node_class: str | None) -> bool:
        """Whether it is about such jobs. A class that is not decided yet matches `*` alone."""
        return (
            self.user in (ANY, user)
            and self.priority in (ANY, priority.value)
            and self.group in (ANY, node_class)
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """What one job holds."""

    job: str
    user: str
    priority: Priority
    node_class: str | None
    nodes: int


@dataclass(slots=True)
class Ledger:
    """Who holds what, and which limits are full, in one moment of one step."""

    quotas: tuple[Quota, ...]
    holdings: dict[str, Holding] = field(default_factory=dict)
    # Nodes by limit and user; and the limits that apply, by user, priority and class.
    _used: dict[tuple[str, str], int] = field(default_factory=dict)
    _limits: dict[tuple[str, Priority, str | None], list[Quota]] = field(default_factory=dict)
    # Limits in which an earlier job waits for room: who comes later waits behind it.
    _waiting: dict[tuple[str, str], str] = field(default_factory=dict)

    def limits(self, user: str, priority: Priority, node_class: str | None) -> list[Quota]:
        """The limits that apply, the tightest first."""
        key = (user, priority, node_class)
        if key not in self._limits:
            found = [one for one in self.quotas if one.applies(user, priority, node_class)]
            own = {(one.priority, one.group) for one in found if one.user != ANY}
            kept = [one for one in found if one.user != ANY or (one.priority, one.group) not in own]
            self._limits[key] = sorted(kept, key=lambda one: (one.nodes, one.name))
        return self._limits[key]

    def hold(self, holding: Holding) -> None:
        """Count what a job holds, instead of what was counted for it before."""
        before = self.holdings.get(holding.job)
        for one, nodes in ((before, -before.nodes if before else 0), (holding, holding.nodes)):
            for quota in self._limits_of(one) if one is not None else ():
                key = (quota.name, holding.user)
                self._used[key] = self._used.get(key, 0) + nodes
        self.holdings[holding.job] = holding

    def used(self, quota: Quota, user: str, *, but: str = "") -> int:
        """Nodes that the user holds under the limit, without those of one job."""
        total = self._used.get((quota.name, user), 0)
        own = self.holdings.get(but)
        if own is not None and own.user == user and quota in self._limits_of(own):
            total -= own.nodes
        return total

    def holders(self, quota: Quota, user: str) -> list[Holding]:
        """The jobs of the user that hold nodes under the limit, the largest first."""
        found = [
            one
            for one in self.holdings.values()
            if one.user == user and quota in self._limits_of(one)
        ]
        return sorted(found, key=lambda one: (-one.nodes, one.job))

    def _limits_of(self, holding: Holding) -> list[Quota]:
        return self.limits(holding.user, holding.priority, holding.node_class)

    def obstacle(self, job: JobState, priority: Priority, node_class: str | None) -> Quota | None:
        """The first limit without room for the job (or with somebody ahead), if there is one."""
        for quota in self.limits(job.user, priority, node_class):
            if self._waiting.get((quota.name, job.user), job.key) != job.key:
                return quota
            if self.used(quota, job.user, but=job.key) + job.spec.nodes > quota.nodes:
                return quota
        return None

    def charge(self, job: JobState, priority: Priority, node_class: str | None) -> None:
        """The job has, or is the next to have, so many nodes."""
        self.hold(Holding(job.key, job.user, priority, node_class, job.spec.nodes))

    def wait_in(self, quota: Quota, job: JobState) -> None:
        """The job waits for room in this limit: nobody of its user overtakes it there."""
        self._waiting.setdefault((quota.name, job.user), job.key)

    def out_of_quota(self, job: JobState, quota: Quota) -> tuple[Pending, list[Blocker]]:
        """Why the job waits for room: the limit, what is used, and by whom."""
        holders = [one for one in self.holders(quota, job.user) if one.job != job.key]
        used = sum(one.nodes for one in holders)
        ahead = self._waiting.get((quota.name, job.user), job.key)
        named = ", ".join(f"{one.job} ({one.nodes})" for one in holders[:_HOLDERS_MAX])
        if len(holders) > _HOLDERS_MAX:
            named += f" and {len(holders) - _HOLDERS_MAX} more jobs"
        left = max(0, quota.nodes - used)
        message = (
            f"quota {quota.name} has {left} of {quota.nodes} nodes left for {job.user}, "
            f"wants {job.spec.nodes}"
        )
        message += f": {used} used by {named}" if holders else ""
        blockers = [Blocker(WAITING_FOR_QUOTA, message, user=job.user, until=quota.expires_at)]
        blockers += [
            Blocker(
                WAITING_FOR_QUOTA,
                f"{one.job} of {one.user} holds {one.nodes} of quota {quota.name}",
                job=one.job, user=one.user,
            )
            for one in holders
        ]  # fmt: skip
        if ahead != job.key:
            text = f"{ahead} is ahead in quota {quota.name}"
            message += f"; {text}"
            blockers.append(Blocker(WAITING_FOR_QUOTA, text, job=ahead, user=job.user))
        blocked_by = tuple(dict.fromkeys(one.job for one in blockers if one.job))
        return Pending(reason=WAITING_FOR_QUOTA, message=message, blocked_by=blocked_by), blockers


def ledger(draft: Draft) -> Ledger:
    """What is held now. Limits that have expired do not apply; those that will wake the engine."""
    found = Ledger(valid(draft))
    if not found.quotas:
        return found  # nobody is limited: nothing is counted
    for job in draft.jobs.values():
        holding = held_by(draft, job)
        if holding is not None:
            found.hold(holding)
    for holding in draft.held_apart:
        found.hold(holding)
    return found


def valid(draft: Draft) -> tuple[Quota, ...]:
    """The limits that apply now."""
    found = []
    for quota in draft.quotas.values():
        if quota.expires_at is not None:
            if quota.expires_at <= draft.now:
                continue
            draft.wake(quota.expires_at)
        found.append(quota)
    return tuple(sorted(found, key=lambda one: one.name))


def held_by(draft: Draft, job: JobState) -> Holding | None:
    """What the job holds: given back only when its nodes are empty."""
    status = job.status
    nodes = sum(not draft.gone_from(job, one.name) for one in status.occupied)
    if status.phase in HOLDING and status.assignment is not None:
        nodes = max(nodes, len(status.assignment.nodes))
    if nodes == 0:
        return None
    return Holding(job.key, job.user, held_priority(draft, job), _class_of(draft, job), nodes)


def held_priority(draft: Draft, job: JobState) -> Priority:
    """The priority at which a job got its nodes."""
    if job.status.priority is not None:
        return job.status.priority
    return _plain(draft, job.spec.priority)


def _plain(draft: Draft, priority: Priority) -> Priority:
    return draft.policy.auto_priority if priority is Priority.AUTO else priority


def _class_of(draft: Draft, job: JobState) -> str | None:
    status = job.status
    if status.assignment is not None and status.assignment.group:
        return status.assignment.group
    if job.spec.node_class is not None:
        return job.spec.node_class
    names = status.assignment.names if status.assignment is not None else ()
    for name in (*names, *(one.name for one in status.occupied)):
        if name in draft.nodes:
            return draft.nodes[name].node.node_class
    return None


def priorities(draft: Draft, job: JobState, quotas: Iterable[Quota]) -> list[Priority]:
    """The levels at which the job may run, the one it prefers first.

    `auto` takes every level that a limit of its user names, and the policy's own; any other
    priority is one level.
    """
    if job.spec.priority is not Priority.AUTO:
        return [job.spec.priority]
    named = {
        Priority(one.priority)
        for one in quotas
        if one.priority != ANY and one.user in (ANY, job.user)
        and (job.spec.node_class is None or one.group in (ANY, job.spec.node_class))
    } | {draft.policy.auto_priority}  # fmt: skip
    return sorted(named, key=lambda one: -one.level)


def exceeded(draft: Draft, job: JobState, classes: Sequence[str]) -> Pending | None:
    """Why no limit would let the job run even if nobody held anything."""
    book = Ledger(valid(draft))
    if not book.quotas:
        return None
    tightest: list[tuple[Quota, Priority]] = []
    for priority in priorities(draft, job, book.quotas):
        for node_class in classes or (job.spec.node_class,):
            limits = book.limits(job.user, priority, node_class)
            if not limits or limits[0].nodes >= job.spec.nodes:
                return None
            tightest.append((limits[0], priority))
    if not tightest:
        return None
    quota, priority = max(tightest, key=lambda one: (one[0].nodes, one[1].level, one[0].name))
    what = f"priority {quota.priority}" if quota.priority != ANY else "any priority"
    where = f"group {quota.group}" if quota.group != ANY else "all groups"
    fewer = f"set spec.nodes to {quota.nodes} or less, " if quota.nodes else ""
    return Pending(
        verdict="Never",
        reason="QuotaExceeded",
        message=f"wants {job.spec.nodes} nodes, quota {quota.name} gives {job.user} "
        f"{quota.nodes or 'none'} at {what} in {where}: {fewer}choose another priority or group, "
        f"or ask for a larger FlyerQuota {quota.name}",
    )


def usage(book: Ledger) -> list[tuple[Quota, list[Holding]]]:
    """Every limit that applies now, and who holds nodes under it."""
    users = sorted({held.user for held in book.holdings.values()})
    return [
        (quota, [one for user in users for one in book.holders(quota, user)])
        for quota in book.quotas
    ]


__all__ = [
    "ANY",
    "Holding",
    "Ledger",
    "Quota",
    "exceeded",
    "held_by",
    "held_priority",
    "ledger",
    "priorities",
    "usage",
    "valid",
]

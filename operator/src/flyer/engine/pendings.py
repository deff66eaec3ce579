"""Why jobs wait, as one pass over the queue finds it, and how often that is written.

The text of a waiting job changes with every job that starts or ends. A changed reason is written at
once. Changed numbers and places are written after a pause that grows with the place in the queue,
and a token bucket bounds all of it: writes do not grow with the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import PendingReason, Unblock
from flyer.api.status import PENDING_CHARS_MAX, PENDING_REASONS_MAX, UNBLOCK_MAX
from flyer.api.waiting import PENDING_EVALUATION, PODS_REFUSED, RESTART_BACKOFF, WAITING_FOR_TURN
from flyer.engine import blockers
from flyer.engine.explanation import Blocker, Detail, Remedy
from flyer.engine.market import options
from flyer.engine.preemption import preemption_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import Pending
    from flyer.engine.claims import Claim
    from flyer.engine.draft import Draft
    from flyer.engine.market import Market
    from flyer.engine.state import JobState

# Nodes that are out do not hide the jobs in the way, nor these them.
_NODES_MAX = 3
# An estimate that moves by less, or by less than this share of what is left, is not news.
_ETA_SECONDS = 60.0
_ETA_SHARE = 0.1


class Pendings:
    """Of one pass over the queue: `set` is called in its order."""

    def __init__(self, market: Market) -> None:
        self._market = market
        self._draft = market.draft
        self._waiting = 0
        self._tokens = self._refilled()
        self._ways_out: dict[tuple[object, ...], tuple[Remedy, ...]] = {}

    def set(self, job: JobState, pending: Pending, claims: Sequence[Claim] = ()) -> None:
        """The job was not placed, for this reason; store it if it is due."""
        draft = self._draft
        self._waiting += 1
        if job.key == draft.subject:
            draft.detail = self._detail(job, pending, claims)
        if job.key in draft.delayed:
            return  # it is planned again in a moment: that saves a write
        known = job.status.pending
        first = known is None or known.reason == PENDING_EVALUATION
        if known is not None and not first and not self._is_due(known, pending):
            return
        if self._tokens >= 1:
            self._tokens -= 1
            pending = _with(self._detail(job, pending, claims))
        elif not first:
            return  # nodes are given out again soon, whatever happens
        if known is None or known.replace(time=None) != pending:
            draft.update(job.key, pending=pending.replace(time=draft.now))

    def close(self) -> None:
        """The pass is over."""
        self._draft.pending_writes = (self._tokens, self._draft.now)

    def _refilled(self) -> float:
        draft, policy = self._draft, self._draft.policy
        if draft.pending_writes is None:
            return policy.pending_writes_burst
        tokens, at = draft.pending_writes
        tokens += max(0.0, draft.now - at) * policy.pending_writes_per_second
        return min(tokens, policy.pending_writes_burst)

    def _is_due(self, known: Pending, pending: Pending) -> bool:
        if known.reason != pending.reason or known.verdict != pending.verdict:
            return True
        policy = self._draft.policy
        age = self._draft.now - known.time if known.time is not None else float("inf")
        if age < max(policy.pending_renew_seconds, self._waiting):
            return False
        if known.unblock and age >= policy.unblock_renew_seconds:
            return True
        return (
            known.position != self._waiting
            or known.message != pending.message
            or known.blocked_by != pending.blocked_by
            or self._moved(known.eta, pending.eta)
        )

    def _moved(self, known: float | None, eta: float | None) -> bool:
        if known is None or eta is None:
            return known is not eta
        return abs(eta - known) > max(_ETA_SECONDS, _ETA_SHARE * (eta - self._draft.now))

    def _detail(self, job: JobState, pending: Pending, claims: Sequence[Claim]) -> Detail:
        market, draft = self._market, self._draft
        first = Blocker(pending.reason, pending.message, until=pending.eta)
        if pending.verdict == "Never" or pending.reason in (PODS_REFUSED, RESTART_BACKOFF):
            return Detail(pending, self._waiting, (first,), ())
        found = blockers.blockers(market, job, claims)
        if job.key in draft.quota_blockers:
            # The quota decides: that nodes are free or not is second.
            found = draft.quota_blockers[job.key] + [one for one in found if one.node]
            return Detail(pending, self._waiting, tuple(found), _quota_remedies(draft, job))
        if pending.reason == WAITING_FOR_TURN and pending.blocked_by:
            ahead = draft.jobs[pending.blocked_by[0]]
            found[0] = Blocker(pending.reason, pending.message, job=ahead.key, user=ahead.user)
        return Detail(pending, self._waiting, tuple(found), self._remedies(job))

    def placed(self) -> None:
        """A job got nodes: the others' ways out are others now."""
        self._ways_out.clear()

    def _remedies(self, job: JobState) -> tuple[Remedy, ...]:
        """The same for jobs that want the same."""
        spec = job.spec
        wants = (
            spec.nodes, spec.node_class, spec.zone, spec.ranks_per_node, spec.cross_zone,
            self._draft.level(job), tuple(job.status.chain.avoid),
        )  # fmt: skip
        if wants not in self._ways_out:
            self._ways_out[wants] = _remedies(self._market, job)
        return self._ways_out[wants]


def _with(detail: Detail) -> Pending:
    """`status.pending` with as much of the detail as fits."""
    nodes = [one for one in detail.blockers if one.node][:_NODES_MAX]
    others = [one for one in detail.blockers if not one.node][: PENDING_REASONS_MAX - len(nodes)]
    listed = others + nodes
    return detail.pending.replace(
        position=detail.position,
        reasons=tuple(
            PendingReason(
                reason=one.reason, message=one.message[:PENDING_CHARS_MAX], job=one.job,
                user=one.user, node=one.node, since=one.since, until=one.until,
            )
            for one in listed
        ),
        more=len(detail.blockers) - len(listed),
        unblock=tuple(
            Unblock(command=one.command, effect=one.effect, node=one.node)
            for one in detail.remedies[:UNBLOCK_MAX]
            if len(one.command) <= PENDING_CHARS_MAX
        ),
    )  # fmt: skip


def _quota_remedies(draft: Draft, job: JobState) -> tuple[Remedy, ...]:
    """A larger quota, or one of the user's own jobs less."""
    found = draft.quota_blockers.get(job.key, [])
    jobs = [draft.jobs[one.job] for one in found[1:] if one.job in draft.jobs]
    running = [one.key for one in jobs if one.holding]
    return tuple(
        Remedy(f"flyer suspend {key}", f"gives its nodes' quota back to {job.user}")
        for key in dict.fromkeys(running)
    )


def _remedies(market: Market, job: JobState) -> tuple[Remedy, ...]:
    """What a person could do, the cheapest first."""
    found: list[Remedy] = []
    for nodes in market.classes(job):
        zones = {node.zone for node in nodes}
        for kind in options(market.draft, job, zones, same_split=False):
            plan = preemption_plan(market, job, nodes, kind, (), anyone=True)
            if plan is None or not plan[1]:
                continue
            victims = plan[1]
            cost = sum(market.lost_node_ms(market.draft.jobs[key]) for key in victims) / 1000
            text = "; ".join(f"flyer suspend {key}" for key in victims)
            found.append(Remedy(text, "frees the nodes once it has saved", cost))
    outs = [
        Remedy("", f"brings back {node.name}", node=node.name)
        for group in market.classes(job)
        for node in group
        if not market.draft.nodes[node.name].eligible
    ]
    unique = {one.command: one for one in found}
    ordered = sorted(unique.values(), key=lambda one: (one.cost_node_seconds or 0.0, one.command))
    return (*ordered, *outs)


__all__ = ["Pendings"]

"""Quotas while nodes are given out: each waiting job in turn passes here before it is placed.

A job that finds no room waits, and so does whoever of the same user comes after it in that limit;
a job that has room and finds no nodes keeps its share of the quota for as long as it is ahead: each
limit is filled in the order of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.api import Priority
from flyer.engine import quotas

if TYPE_CHECKING:
    from flyer.api import Pending
    from flyer.engine.market import Market
    from flyer.engine.state import JobState


@dataclass(slots=True)
class QuotaGate:
    """One pass over the queue."""

    market: Market
    ledger: quotas.Ledger = field(init=False)
    _levels: dict[str, list[Priority]] = field(default_factory=dict)
    _verdicts: dict[tuple[object, ...], Pending | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = quotas.ledger(self.market.draft)
        self._adopt_priorities()

    def _adopt_priorities(self) -> None:
        """A job that runs changes to the level that its spec asks for once there is room there."""
        draft = self.market.draft
        active = draft.active_jobs()
        for key in sorted(active):
            job = active[key]
            wanted, held = job.spec.priority, job.status.priority
            if not job.holding or wanted in (Priority.AUTO, held):
                continue
            if not self.ledger.quotas:
                draft.update(key, priority=wanted)
                continue
            node_class = self.ledger.holdings[key].node_class
            if self.ledger.obstacle(job, wanted, node_class) is None:
                draft.update(key, priority=wanted)
                self.ledger.charge(draft.jobs[key], wanted, node_class)

    @property
    def limited(self) -> bool:
        """Whether any limit applies now."""
        return bool(self.ledger.quotas)

    def enter(self, job: JobState, level: int | None = None) -> None:
        """The job joins the queue, `auto` at this level; None: at its highest."""
        if self.ledger.quotas and job.spec.priority is Priority.AUTO:
            levels = quotas.priorities(self.market.draft, job, self.ledger.quotas)
            self._levels[job.key] = levels
            at = (one for one in levels if level is None or one.level == level)
            self.market.draft.auto[job.key] = next(at, levels[0])

    def lower(self, job: JobState) -> bool:
        """Whether an `auto` job without room at its level goes on at its next lower one."""
        levels = self._levels.get(job.key)
        if levels is None or self._fits(job):
            return False
        draft = self.market.draft
        at = levels.index(draft.priority(job))
        if at + 1 == len(levels):
            # Nowhere: it waits at the level that has no need of a quota, or else at the lowest.
            own = draft.policy.auto_priority
            draft.auto[job.key] = own if own in levels else levels[-1]
            del self._levels[job.key]
            return False
        draft.auto[job.key] = levels[at + 1]
        return True

    def never(self, job: JobState) -> Pending | None:
        """Why no limit would let the job run, ever."""
        if not self.ledger.quotas:
            return None
        spec, classes = job.spec, self._classes(job)
        wanted = (
            self.ledger.subjects(job), spec.nodes, spec.priority, spec.node_class, *classes
        )  # fmt: skip
        if wanted not in self._verdicts:
            self._verdicts[wanted] = quotas.exceeded(self.market.draft, job, classes)
        return self._verdicts[wanted]

    def refusal(self, job: JobState) -> Pending | None:
        """Why the job has to wait for room, if it has; it keeps its place in the limit."""
        if not self.ledger.quotas or self._fits(job):
            return None
        draft = self.market.draft
        found = [
            quota
            for node_class in self._classes(job) or (job.spec.node_class,)
            if (quota := self.ledger.obstacle(job, draft.priority(job), node_class)) is not None
        ]
        pending, reasons = self.ledger.out_of_quota(job, found[0])
        draft.quota_blockers[job.key] = reasons
        for quota in found:
            self.ledger.wait_in(quota, job)
        return pending

    def admits(self, job: JobState, node_class: str) -> bool:
        """Whether the job may have nodes of this class."""
        if not self.ledger.quotas:
            return True
        priority = self.market.draft.priority(job)
        return self.ledger.obstacle(job, priority, node_class) is None

    def charges(self, job: JobState) -> bool:
        """Whether `fill` may leave less room for others."""
        if not self.ledger.quotas:
            return False
        subjects, priority = self.ledger.subjects(job), self.market.draft.priority(job)
        classes = self._classes(job) or (job.spec.node_class,)
        return any(self.ledger.limits(subjects, priority, node_class) for node_class in classes)

    def fill(self, job: JobState) -> None:
        """The job has its share, with nodes or without: who comes later finds so much less."""
        if not self.ledger.quotas:
            return
        job = self.market.draft.jobs[job.key]
        assignment = job.status.assignment
        node_class = assignment.node_class if assignment is not None else job.spec.node_class
        self.ledger.charge(job, self.market.draft.priority(job), node_class)

    def _fits(self, job: JobState) -> bool:
        """Whether limits leave it room in a class that has as many nodes as it wants."""
        classes = self.market.classes(job)
        large = [nodes for nodes in classes if len(nodes) >= job.spec.nodes] or classes
        return any(self.admits(job, nodes[0].node_class) for nodes in large)

    def _classes(self, job: JobState) -> list[str]:
        return [nodes[0].node_class for nodes in self.market.classes(job)]


__all__ = ["QuotaGate"]

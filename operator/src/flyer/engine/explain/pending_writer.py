"""Writes `status.pending`: why jobs wait, as a scheduling pass finds it, at a limited rate.

The text of a waiting job changes with every job that starts or ends. A changed reason is written at
once. Changed numbers are written after a pause that grows with the position in the queue. A token
bucket limits all writes, so that their rate does not grow with the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import PendingReason, Unblock
from flyer.api.limits import PENDING_CHARS_MAX, PENDING_REASONS_MAX, UNBLOCK_MAX
from flyer.api.waiting import PENDING_EVALUATION, PODS_REFUSED, RESTART_BACKOFF, WAITING_FOR_TURN
from flyer.engine.explain import pending_reasons
from flyer.engine.explain.remedies import RemedySearch
from flyer.engine.state.explanation import Blocker, Detail, Remedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import Pending
    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.placement.reservations import Reservation
    from flyer.engine.state.cycle_state import CycleState
    from flyer.engine.state.jobs import JobState

# Unavailable nodes and other jobs share the list, so that neither hides the other.
_NODES_MAX = 3
# An estimate that changes by less, or by a smaller share of the remaining time, is not written.
_ETA_SECONDS = 60.0
_ETA_SHARE = 0.1


class PendingWriter:
    """Writer of one scheduling pass: `set` is called in the order of the queue."""

    def __init__(self, availability: NodeAvailability) -> None:
        self._availability = availability
        self._cycle = availability.cycle
        self._tokens = self._refilled()
        self._remedies = RemedySearch(availability)

    def set(
        self,
        job: JobState,
        pending: Pending,
        position: int,
        reservations: Sequence[Reservation] = (),
    ) -> None:
        """Store why the job was not placed, if a write is due."""
        cycle = self._cycle
        if job.key == cycle.explained_job:
            cycle.explained_detail = self._detail(job, pending, position, reservations)
        if job.key in cycle.delayed_preemptions:
            return  # its preemption is planned again soon: this saves a write
        previous = job.status.pending
        first = previous is None or previous.reason == PENDING_EVALUATION
        if previous is not None and not first and not self._is_due(previous, pending, position):
            return
        if self._tokens >= 1 and (self._is_plain(job, pending) or self._remedies.is_available(job)):
            self._tokens -= 1
            most = PENDING_REASONS_MAX
            pending = _with(self._detail(job, pending, position, reservations, most))
        elif not first:
            return  # the next scheduling pass follows soon in any case
        if previous is None or previous.replace(time=None) != pending:
            cycle.update(job.key, pending=pending.replace(time=cycle.now))

    def close(self) -> None:
        """Finish the pass."""
        self._cycle.pending_writes = (self._tokens, self._cycle.now)
        self._remedies.close()

    def _is_plain(self, job: JobState, pending: Pending) -> bool:
        """Whether released nodes would not help the job."""
        if job.key in self._cycle.quota_blockers:
            return True
        behind_own = pending.reason == WAITING_FOR_TURN and not pending.blocked_by
        paused = pending.reason in (PODS_REFUSED, RESTART_BACKOFF)
        return behind_own or paused or pending.verdict == "Never"

    def _refilled(self) -> float:
        cycle, settings = self._cycle, self._cycle.settings
        if cycle.pending_writes is None:
            return settings.pending_writes_burst
        tokens, at = cycle.pending_writes
        tokens += max(0.0, cycle.now - at) * settings.pending_writes_per_second
        return min(tokens, settings.pending_writes_burst)

    def _is_due(self, previous: Pending, pending: Pending, position: int) -> bool:
        if previous.reason != pending.reason or previous.verdict != pending.verdict:
            return True
        settings = self._cycle.settings
        age = self._cycle.now - previous.time if previous.time is not None else float("inf")
        if age < max(settings.pending_renew_seconds, position):
            return False
        if previous.unblock and age >= settings.unblock_renew_seconds:
            return True
        return (
            previous.position != position
            or previous.message != pending.message
            or previous.blocked_by != pending.blocked_by
            or self._moved(previous.eta, pending.eta)
        )

    def _moved(self, previous: float | None, eta: float | None) -> bool:
        if previous is None or eta is None:
            return previous is not eta
        return abs(eta - previous) > max(_ETA_SECONDS, _ETA_SHARE * (eta - self._cycle.now))

    def _detail(
        self,
        job: JobState,
        pending: Pending,
        position: int,
        reservations: Sequence[Reservation],
        most: int | None = None,
    ) -> Detail:
        """The detail with all blockers, or with at most `most` of each kind."""
        availability, cycle = self._availability, self._cycle
        first = Blocker(pending.reason, pending.message, until=pending.eta)
        if self._is_plain(job, pending) and job.key not in cycle.quota_blockers:
            return Detail(pending, position, (first,), ())
        reasons, more = pending_reasons.blockers(availability, job, reservations, most)
        if job.key in cycle.quota_blockers:
            # The quota decides, whether nodes are free or not.
            nodes = [match for match in reasons if match.node]
            more = len(availability.supply(job).out) - len(nodes)
            reasons = cycle.quota_blockers[job.key] + nodes
            return Detail(pending, position, tuple(reasons), _quota_remedies(cycle, job), more)
        if pending.reason == WAITING_FOR_TURN:
            ahead = cycle.jobs[pending.blocked_by[0]]
            reasons[0] = Blocker(pending.reason, pending.message, job=ahead.key, user=ahead.user)
        return Detail(pending, position, tuple(reasons), self._remedies.of(job), more)

    def placed(self) -> None:
        """Drop known remedies after an allocation."""
        self._remedies.clear()


def _with(detail: Detail) -> Pending:
    """`status.pending` with the part of the detail that fits."""
    nodes = [blocker for blocker in detail.blockers if blocker.node][:_NODES_MAX]
    other_blockers = [blocker for blocker in detail.blockers if not blocker.node][
        : PENDING_REASONS_MAX - len(nodes)
    ]
    listed = other_blockers + nodes
    return detail.pending.replace(
        position=detail.position,
        reasons=tuple(
            PendingReason(
                reason=blocker.reason, message=blocker.message[:PENDING_CHARS_MAX], job=blocker.job,
                user=blocker.user, node=blocker.node, since=blocker.since, until=blocker.until,
            )
            for blocker in listed
        ),
        more=len(detail.blockers) + detail.more - len(listed),
        unblock=tuple(
            Unblock(command=remedy.command, effect=remedy.effect, node=remedy.node)
            for remedy in detail.remedies[:UNBLOCK_MAX]
            if len(remedy.command) <= PENDING_CHARS_MAX
        ),
    )  # fmt: skip


def _quota_remedies(cycle: CycleState, job: JobState) -> tuple[Remedy, ...]:
    """Suspending a job of the same user, which frees room in the quota."""
    blockers = cycle.quota_blockers.get(job.key, [])
    jobs = [cycle.jobs[match.job] for match in blockers[1:] if match.job in cycle.jobs]
    running = [other.key for other in jobs if other.holding]
    return tuple(
        Remedy(f"flyer suspend {key}", f"gives its nodes' quota back to {job.user}")
        for key in dict.fromkeys(running)
    )


__all__ = ["PendingWriter"]

"""Reasons for which jobs have no nodes: messages of `status.pending` and blockers for `explain`."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from flyer.api import CrossZone, Pending, PendingReason
from flyer.api.limits import PENDING_REASONS_MAX
from flyer.api.waiting import (
    PODS_REFUSED,
    RESTART_BACKOFF,
    WAITING_FOR_CROSS_ZONE_TOKEN,
    WAITING_FOR_NODES,
    WAITING_FOR_PREEMPTED,
    WAITING_FOR_TURN,
    WAITING_FOR_ZONE,
    WAITING_FOR_ZONE_LAYOUT,
)
from flyer.engine.placement.node_selection import (
    node_requirements,
    placement_history,
    zone_layout_deadline,
)
from flyer.engine.state.explanation import Blocker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flyer.engine.placement.availability import NodeAvailability
    from flyer.engine.placement.reservations import Reservation
    from flyer.engine.state.jobs import JobState


# Names in one message; others are counted.
_NAMES_MAX = 5
# Names in `blockedBy`: the statuses of a queue of thousands of jobs stay small.
BLOCKED_BY_MAX = 32


def infeasible(availability: NodeAvailability, job: JobState) -> Pending | None:
    """Why the cluster could not run the job if all its nodes were healthy and free."""
    cycle, spec = availability.cycle, job.spec
    required = spec.nodes
    classes = sorted({node_class for node_class, _, _ in availability.inventory})
    if spec.node_class is not None and spec.node_class not in classes:
        have = ", ".join(classes) if classes else "no nodes at all"
        return _never(
            "NoMatchingNodeClass", f"no node has node class {spec.node_class}; there are {have}"
        )
    of_class = [
        entry for entry in availability.inventory.items() if spec.node_class in (None, entry[0][0])
    ]
    zones = sorted({zone for (_, zone, _), _ in of_class})
    if spec.zone is not None and spec.zone not in zones:
        have = ", ".join(zones) if zones else "no zone"
        return _never("NoMatchingZone", f"{_scope(job)} has no zone {spec.zone}; it has {have}")
    big: dict[str, Counter[str]] = {}  # nodes by class and zone
    for (node_class, zone, slots), count in of_class:
        if slots >= spec.ranks_per_node:
            big.setdefault(node_class, Counter())[zone] += count
    if not big:
        most = max((slots for (_, _, slots), _ in of_class), default=0)
        return _never(
            "InsufficientSlots",
            f"ranksPerNode {spec.ranks_per_node} is more than any node has slots ({most})",
        )
    best_zone, best_pair, best_all = 0, 0, 0
    for _, members in sorted(big.items()):
        sizes = sorted(members.values(), reverse=True)
        pinned = members[spec.zone] if spec.zone is not None else sizes[0]
        best_zone, best_pair = max(best_zone, pinned), max(best_pair, sum(sizes[:2]))
        best_all = max(best_all, sum(sizes))
    if required > best_all:
        text = f"wants {required} nodes, the {_scope(job)} has {best_all} in all"
        return _never("InsufficientNodes", f"{text}: set spec.nodes to {best_all} or less")
    if spec.zone is not None and required > best_zone:
        text = f"wants {required} nodes in zone {spec.zone}, which has {best_zone}"
        return _never(
            "TopologyPlacementFailed",
            f"{text}: set spec.nodes to {best_zone} or less, or remove spec.zone",
        )
    if spec.cross_zone is CrossZone.NEVER and required > best_zone:
        text = f"wants {required} nodes in one zone, the largest has {best_zone}"
        return _never("TopologyPlacementFailed", f"{text}: set spec.crossZone to LastResort")
    if not cycle.may_cross(job) and required > best_zone:
        text = f"wants {required} nodes in one zone, the largest has {best_zone}"
        hint = "the FlyerTopology lets no gang cross zones (spec.crossZoneJobs is 0)"
        return _never("TopologyPlacementFailed", f"{text}: {hint}")
    if spec.zone is None and required > max(best_zone, best_pair):
        text = f"wants {required} nodes, two zones have at most {best_pair}"
        return _never("TopologyPlacementFailed", f"{text}: a gang spans two zones at most")
    return None


def _never(reason: str, message: str) -> Pending:
    return Pending(verdict="Never", reason=reason, message=message)


def _scope(job: JobState) -> str:
    return f"node class {job.spec.node_class}" if job.spec.node_class else "cluster"


def draining(
    availability: NodeAvailability, job: JobState, occupied: Sequence[str], leaving: Sequence[str]
) -> Pending:
    """The job has reserved its nodes, and other jobs have not left them yet."""
    holders = Counter(availability.occupied_by[name] for name in occupied)
    parts = [
        f"{count} node{'s' if count > 1 else ''} of "
        f"{'its own attempt before' if holder == job.key else holder}"
        for holder, count in sorted(holders.items())
    ]
    if leaving:
        parts.append(f"the cross-zone token of {', '.join(leaving)}")
    jobs = availability.cycle.jobs
    blocked_by = sorted({*holders, *leaving} - {job.key})
    deadlines = [
        suspension.deadline
        for key in blocked_by
        if (suspension := jobs[key].status.suspension) is not None
    ]
    named = blocked_by[:PENDING_REASONS_MAX]
    return Pending(
        reason=WAITING_FOR_PREEMPTED,
        message=f"waits for {' and '.join(parts)} to be given back",
        eta=max(deadlines) if deadlines else None,
        blocked_by=tuple(blocked_by[:BLOCKED_BY_MAX]),
        reasons=tuple(_leaves(jobs[key]) for key in named),
        more=len(blocked_by) - len(named),
    )


def _leaves(other: JobState) -> PendingReason:
    """Reason for another job that has not left its nodes yet."""
    suspension, code = other.status.suspension, int(other.status.suspend_code)
    return PendingReason(
        reason=WAITING_FOR_PREEMPTED,
        message=f"{other.key} of {other.user} is leaving (suspend code {code})",
        job=other.key,
        user=other.user,
        since=suspension.since if suspension else None,
        until=suspension.deadline if suspension else None,
    )


def in_backoff(job: JobState, until: float) -> Pending:
    """The job is in a pause after failures or refused pods, until this time."""
    eviction = job.status.eviction
    if eviction is not None and eviction.reason == PODS_REFUSED:
        times = job.status.history.refusals
        often = "" if times < 2 else f" {times} times in a row"
        why = f"its pods were refused{often}, and are tried again: {eviction.message}"
        return Pending(reason=PODS_REFUSED, message=why, eta=until)
    why = (
        f"failed {job.status.history.restarts_without_progress} times in a row without a newer "
        "checkpoint: pauses before the next attempt"
    )
    return Pending(reason=RESTART_BACKOFF, message=why, eta=until)


def behind_job(ahead: JobState) -> Pending:
    """A job ahead requires the same nodes and gets none either."""
    return Pending(
        reason=WAITING_FOR_TURN,
        message=f"behind {ahead.key}, which waits for {ahead.spec.nodes} nodes of the same kind",
        blocked_by=(ahead.key,),
    )


def behind_own_jobs(job: JobState, count: int) -> Pending:
    """The user has more waiting jobs than a scheduling pass visits."""
    return Pending(
        reason=WAITING_FOR_TURN,
        message=f"behind {count} jobs of {job.user} that wait ahead of it: the scheduler looks at "
        "no more of one user at a time",
    )


def not_placed(
    availability: NodeAvailability,
    job: JobState,
    reservations: Sequence[Reservation],
    eta: float | None,
) -> Pending:
    """Why the job was not placed in this pass, in one line."""
    count = _count(availability, job, reservations)
    reasons = list(islice(_reasons(availability, job, reservations, _NAMES_MAX), _NAMES_MAX))
    message = "; ".join(match.message for match in reasons)
    if count > _NAMES_MAX:
        message += f"; and {count - _NAMES_MAX} more reasons"
    jobs = [reasons[0].job] if reasons[0].job else []
    jobs += [key for key, _ in _holders(availability, job)]
    jobs += [reservation.job for reservation, _ in _ahead(availability, job, reservations)]
    return Pending(
        reason=reasons[0].reason, message=message, eta=eta,
        blocked_by=tuple(dict.fromkeys(jobs))[:BLOCKED_BY_MAX],
    )  # fmt: skip


def blockers(
    availability: NodeAvailability,
    job: JobState,
    reservations: Sequence[Reservation],
    most: int | None = None,
) -> tuple[list[Blocker], int]:
    """All reasons, the deciding one first, and the number that `most` per kind leaves out."""
    reasons = list(_reasons(availability, job, reservations, most))
    return reasons, _count(availability, job, reservations) - len(reasons)


def _count(
    availability: NodeAvailability, job: JobState, reservations: Sequence[Reservation]
) -> int:
    jobs = len(_holders(availability, job)) + len(_ahead(availability, job, reservations))
    return 1 + jobs + len(availability.supply(job).out)


def _reasons(
    availability: NodeAvailability,
    job: JobState,
    reservations: Sequence[Reservation],
    most: int | None = None,
) -> Iterator[Blocker]:
    cycle, supply = availability.cycle, availability.supply(job)
    free = sum(supply.free.values())
    short = job.spec.nodes - free
    if short > 0:
        text = f"{short} of {job.spec.nodes} nodes missing ({free} free: {supply.sizes})"
        yield Blocker(WAITING_FOR_NODES, text)
    else:
        yield _topology(availability, job, supply.sizes)
    for key, count in _holders(availability, job)[:most]:
        yield _holder(availability, job, cycle.jobs[key], count)
    for reservation, nodes in _ahead(availability, job, reservations)[:most]:
        text = f"{reservation.job} is ahead and waits for {nodes} of the nodes"
        user = cycle.jobs[reservation.job].user
        yield Blocker(WAITING_FOR_TURN, text, job=reservation.job, user=user)
    for name in supply.out[:most]:
        state = cycle.nodes[name]
        why = state.node.reason or state.lost or state.out or "not ready"
        yield Blocker("NodeNotReady", f"node {name} is out: {why}", node=name)


def _topology(availability: NodeAvailability, job: JobState, sizes: str) -> Blocker:
    """Enough nodes are free, but not in zones in which the gang may be placed."""
    keeping, leaving = availability.token_holders(job)
    deadline = zone_layout_deadline(availability.cycle, job)
    if deadline is not None:
        layout = "+".join(str(count) for count in placement_history(job).zone_layout)
        text = f"waits for nodes with the zone layout of its checkpoint, {layout} ({sizes} free)"
        return Blocker(WAITING_FOR_ZONE_LAYOUT, text, until=deadline)
    holders = keeping + leaving
    if holders and availability.cycle.may_cross(job):
        owner = availability.cycle.jobs[holders[0]]
        text = f"no zone has {job.spec.nodes} free nodes ({sizes}), and {owner.key} crosses zones"
        return Blocker(WAITING_FOR_CROSS_ZONE_TOKEN, text, job=owner.key, user=owner.user)
    text = f"no zone has {job.spec.nodes} free nodes for it ({sizes})"
    return Blocker(WAITING_FOR_ZONE, text)


def _holders(availability: NodeAvailability, job: JobState) -> list[tuple[str, int]]:
    """Other jobs that have nodes which this one could use, with the number of nodes."""
    return [holder for holder in availability.supply(job).held if holder[0] != job.key]


def _ahead(
    availability: NodeAvailability, job: JobState, reservations: Sequence[Reservation]
) -> list[tuple[Reservation, int]]:
    """Reservations of other jobs on nodes which this one could use, with their number."""
    usable = availability.supply(job).usable
    counted = [
        (reservation, len(reservation.nodes & usable))
        for reservation in reservations
        if reservation.job != job.key
    ]
    return [entry for entry in counted if entry[1]]


def _holder(availability: NodeAvailability, job: JobState, other: JobState, count: int) -> Blocker:
    cycle = availability.cycle
    assignment = other.status.assignment
    until: float | None = None
    text = f"{other.key} of {other.user} has {count}"
    at = availability.preemptible_at(job, other)
    lower = cycle.level(other) < cycle.level(job)
    if cycle.now < at < math.inf:
        until = at
    if lower and until is not None:
        text += " and is in its minimum runtime"
    elif not lower and other.status.phase.value != "Suspending":
        text += f" at priority {other.spec.priority}"
    since = assignment.reserved_at if assignment else None
    return Blocker(
        WAITING_FOR_NODES, text, job=other.key, user=other.user, since=since, until=until
    )


class PendingReasonCache:
    """Cache of messages: jobs with equal requirements have equal ones.

    How long a job may run, how it may be preempted and which nodes it remembers are not in these
    messages, unless it waits for the zone layout of its checkpoint. A job that still occupies
    nodes, or waits for nodes that it has reserved, is not comparable.
    """

    def __init__(self, availability: NodeAvailability) -> None:
        self._availability = availability
        self._known: dict[tuple[object, ...], Pending] = {}

    def of(
        self,
        job: JobState,
        reservations: Sequence[Reservation],
        own: Sequence[Reservation],
        eta: float | None,
    ) -> Pending:
        """The pending status of the job. `own`: its reservations."""
        availability = self._availability
        if own or job.status.occupied or zone_layout_deadline(availability.cycle, job) is not None:
            return not_placed(availability, job, reservations, eta)
        spec, level = job.spec, availability.cycle.level(job)
        key = (level, *node_requirements(job), spec.cross_zone, spec.nodes, len(reservations))
        if key not in self._known:
            self._known[key] = not_placed(availability, job, reservations, eta)
        return self._known[key]

    def clear(self) -> None:
        """Clear the cache after an allocation."""
        self._known.clear()


__all__ = [
    "PendingReasonCache",
    "behind_job",
    "behind_own_jobs",
    "blockers",
    "draining",
    "in_backoff",
    "infeasible",
    "not_placed",
]

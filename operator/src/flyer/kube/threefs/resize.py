"""Number of storage services: drains before services are removed, and their cancellation. Pure.

Drains are Jobs with the key of the cluster. The drain Job waits until its services are empty; only
its success permits their removal. A drain whose services are wanted again is suspended first, so
that none of its pods starts later, and is then cancelled by another Job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flyer.kube.threefs.health import Health
    from flyer.kube.threefs.observed import DrainJob, Observed

__all__ = ["Resize", "resize"]

RETRY_SECONDS: Final = 120.0
"""Pause after a drain that made no progress."""


@dataclass(frozen=True, slots=True)
class Resize:
    """What to do about the number of storage services."""

    replicas: int | None = None
    """Pods that the StatefulSet should have now; None: the desired number."""
    drain: frozenset[int] = frozenset()
    """Services for which a drain Job is created."""
    keep: frozenset[int] = frozenset()
    """Services for which a Job that cancels their drain is created."""
    suspend: str = ""
    """Name of a Job to suspend."""
    remove: tuple[str, ...] = ()
    """Names of Jobs to delete."""
    note: str = ""
    """What the change does or waits for; empty: the number is the desired one."""
    failed: bool = False
    """Whether the drain makes no progress."""


def resize(want: int, observed: Observed) -> Resize:
    """The next step towards the desired number of storage services."""
    service = observed.sets.get("storage")
    if service is None:
        # Services with data are drained before they are removed, also if their StatefulSet was.
        return Resize(max([want, *(ordinal + 1 for ordinal in observed.claims)]))
    live, keep = service.replicas, observed.keep
    if keep is not None and not keep.ended:
        return Resize(live, note=f"cancelling the drain of {_names(keep.nodes)}")
    wanted_again = _wanted_again(want, live, observed)
    if wanted_again:
        return _keep(wanted_again, live, observed)
    if keep is not None:
        return Resize(live, remove=(keep.name,), note="the drain is cancelled")
    if want < live:
        return _shrink(want, live, observed)
    remove = () if observed.drain is None else (observed.drain.name,)
    return Resize(
        want, remove=remove, note=f"from {live} to {want} storage services" if want > live else ""
    )


def _wanted_again(want: int, live: int, observed: Observed) -> frozenset[int]:
    """Services that the operator has drained and that are to stay, or to come back.

    Other services may be drained by an administrator; their drain is not cancelled.
    """
    job, health = observed.drain, observed.health
    in_job = frozenset() if job is None else frozenset(node for node in job.nodes if node <= want)
    removed = range(live + 1, want + 1)
    marked = (
        frozenset()
        if health is None
        else frozenset(
            node for node in removed if node in health.nodes and health.nodes[node].draining
        )
    )
    return in_job | marked


def _keep(nodes: frozenset[int], live: int, observed: Observed) -> Resize:
    drain, keep, what = observed.drain, observed.keep, f"the drain of {_names(nodes)}"
    if drain is not None and not drain.ended and not drain.stopped:
        name = "" if drain.stopping else drain.name
        return Resize(live, suspend=name, note=f"stopping {what}")
    if keep is None:
        return Resize(live, keep=nodes, note=f"cancelling {what}")
    if keep.succeeded:
        done = drain is not None and nodes <= keep.nodes
        jobs = (keep.name, drain.name) if drain is not None and done else (keep.name,)
        return Resize(live, remove=jobs, note=f"cancelled {what}")
    return _again(keep, live, observed.now, f"{what} cannot be cancelled")


def _shrink(want: int, live: int, observed: Observed) -> Resize:
    health, job = observed.health, observed.drain
    leaving = frozenset(range(want + 1, live + 1))
    if health is None:
        return Resize(live, note="a drain waits: mgmtd does not respond")
    known = leaving & health.nodes.keys()
    if job is None:
        if not known:  # they have never registered
            return Resize(want, note=f"from {live} to {want} storage services")
        return Resize(live, drain=known, note=f"draining {_names(known)}")
    if not known <= job.nodes <= leaving:
        return Resize(live, remove=(job.name,), note=f"draining {_names(known)}")
    if job.failed_at is not None:
        return _again(job, live, observed.now, f"the drain of {_names(known)} makes no progress")
    left = _left(known, health)
    if not job.succeeded:
        return Resize(live, note=f"draining {_names(known)}: {left} replicas are left")
    if left or not all(health.nodes[node].draining for node in known):
        return Resize(live, remove=(job.name,), note=f"{_names(known)} must be drained again")
    if health.unavailable:
        return Resize(live, note=f"removal waits: {health.unavailable} chains are unavailable")
    return Resize(want, note=f"removing {_names(leaving)}")


def _again(job: DrainJob, live: int, now: float, what: str) -> Resize:
    """Repeat a failed Job after a pause."""
    due = job.failed_at is None or now - job.failed_at >= RETRY_SECONDS
    note = f"{what}: {job.message}" if job.message else what
    return Resize(live, remove=(job.name,) if due else (), note=note, failed=True)


def _left(nodes: frozenset[int], health: Health) -> int:
    return sum(health.nodes[node].replicas for node in nodes)


def _names(nodes: frozenset[int]) -> str:
    return ", ".join(f"service-{node}" for node in sorted(nodes)[:5]) + (
        f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    )

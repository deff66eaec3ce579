"""Values of explanations: why a job has no nodes, and what would change that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flyer.api import Pending


@dataclass(frozen=True, slots=True)
class Blocker:
    """One reason why the job cannot start now."""

    reason: str  # in CamelCase, as in Kueue
    message: str  # with names and numbers
    job: str = ""  # the job that has the nodes or is ahead
    user: str = ""  # owner of that job
    node: str = ""  # the node that is unavailable
    since: float | None = None
    until: float | None = None  # when it ends by itself, if known


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that would let the job start.

    The command that makes a node available depends on the cluster, so the driver adds it.
    """

    command: str  # empty: `node` has to become available
    effect: str
    cost_node_seconds: float | None = None  # work that the command loses
    node: str = ""
    jobs: tuple[str, ...] = ()  # the jobs that the command affects


@dataclass(frozen=True, slots=True)
class Detail:
    """Why one waiting job was not placed in a step."""

    pending: Pending
    position: int  # in the queue, from 1
    blockers: tuple[Blocker, ...]  # the deciding one first
    remedies: tuple[Remedy, ...]  # the cheapest first
    more: int = 0  # blockers that are not listed


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of the state of one job.

    `verdict`: "can" (it has its nodes, or gets them in the next step), "cannot" (not now), "never"
    (not in this cluster as it is), "suspended" (spec.suspend), "ended".
    """

    job: str
    phase: str
    verdict: Literal["can", "cannot", "never", "suspended", "ended"]
    summary: str
    position: int | None = None  # in the queue, from 1
    blockers: tuple[Blocker, ...] = ()
    preempted_by: str = ""
    preempted_at: float | None = None
    eta: float | None = None
    remedies: tuple[Remedy, ...] = ()  # the cheapest first


def waiting_summary(pending: Pending, deciding: str) -> str:
    """One-line summary for a waiting job."""
    if pending.verdict == "Never":
        return f"can never run here: {pending.message}"
    return f"cannot start now: {deciding}"


__all__ = ["Blocker", "Detail", "Explanation", "Remedy", "waiting_summary"]

"""What `explain` answers: why a job has no nodes, and what would change that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flyer.api import Pending


@dataclass(frozen=True, slots=True)
class Blocker:
    """One reason why the job cannot start now."""

    reason: str  # Kueue's word
    message: str  # with numbers
    job: str = ""  # the job in the way, if one is
    user: str = ""  # its owner
    node: str = ""  # the node in the way, if one is
    since: float | None = None
    until: float | None = None  # when it ends by itself, if that is known


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that would let the job start.

    What brings a node back depends on how the cluster is run, so its driver knows the command.
    """

    command: str  # empty: `node` has to come back
    effect: str
    cost_node_seconds: float | None = None  # work that would be lost
    node: str = ""
    jobs: tuple[str, ...] = ()  # whom the command is about


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
    """Everything about one job's place.

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
    """The answer for a job that waits, in one line."""
    if pending.verdict == "Never":
        return f"can never run here: {pending.message}"
    return f"cannot start now: {deciding}"


__all__ = ["Blocker", "Detail", "Explanation", "Remedy", "waiting_summary"]

"""Phases of a job (`status.phase`) and the values of `status.suspendCode`."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Phase(StrEnum):
    """A summary of the job's state; conditions have the reasons."""

    QUEUED = "Queued"
    RESERVED = "Reserved"  # has its nodes, all empty; starts in the same step
    DRAINING = "Draining"  # has its nodes; those who were there are leaving
    STARTING = "Starting"
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"  # by spec.suspend; a preempted job is Queued again
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        """Whether the job has ended permanently."""
        return self in ENDED

    @property
    def idle(self) -> bool:
        """Whether the job is queued or suspended: no nodes are assigned to it."""
        return self in IDLE

    @property
    def has_pods(self) -> bool:
        """Whether pods of its attempt may run."""
        return self in WITH_PODS


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED})
IDLE = frozenset({Phase.QUEUED, Phase.SUSPENDED})
WITH_PODS = frozenset({Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING})


class SuspendCode(IntEnum):
    """How far a suspension is; it only grows within an attempt."""

    NONE = 0
    SENT = 1
    RECEIVED = 2
    MAY_SUSPEND = 3  # the job has saved and gives its nodes back


__all__ = ["ENDED", "Phase", "SuspendCode"]

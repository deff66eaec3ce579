"""Phases of a job (`status.phase`) and the values of `status.suspendCode`."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Phase(StrEnum):
    """A summary of where the job is; conditions say why."""

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


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class SuspendCode(IntEnum):
    """How far a suspension is; it only grows within an attempt."""

    NONE = 0
    SENT = 1
    RECEIVED = 2
    MAY_SUSPEND = 3  # the job has saved and gives its nodes back


__all__ = ["ENDED", "Phase", "SuspendCode"]

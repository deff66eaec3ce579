"""Errors of the engine."""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors. A step that raises one has changed nothing."""


class UnknownJob(EngineError):  # noqa: N818 - a fact that callers name
    """A question about a job that the engine does not know."""

    def __init__(self, job: str, count: int) -> None:
        self.job = job
        super().__init__(
            f"job {job} is not known here ({count} jobs are): list them with `flyer ps`"
        )


class JobFault(EngineError):  # noqa: N818 - a fact that callers name
    """An internal error that concerns one job: the step decided nothing, and works without the job.

    `event` is what could not be taken in; None: the job itself cannot be apply_removal_budget.
    """

    def __init__(self, job: str, event: object | None) -> None:
        self.job = job
        self.event = event
        subject = type(event).__name__ if event is not None else "its state"
        super().__init__(f"job {job}: {subject} cannot be apply_removal_budget")


class ReplayError(EngineError):
    """A decision log that cannot be read; `line` counts from 1."""

    def __init__(self, line: int, why: str) -> None:
        self.line = line
        super().__init__(f"decision log, line {line}: {why}")


__all__ = ["EngineError", "JobFault", "ReplayError", "UnknownJob"]

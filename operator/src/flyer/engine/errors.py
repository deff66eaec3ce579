"""Errors of the engine."""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors. A step that raises one has changed nothing."""


class UnknownJob(EngineError):  # noqa: N818 - callers handle it as a result
    """An explanation was requested for a job that the engine does not have."""

    def __init__(self, job: str, count: int) -> None:
        self.job = job
        super().__init__(
            f"job {job} does not exist ({count} jobs exist): run `flyer ps` to list them"
        )


class JobFault(EngineError):  # noqa: N818 - callers handle it as a result
    """An internal error with one job: the step changed nothing, and succeeds without the job.

    `event` is the event that could not be handled; None: the job's state could not be processed.
    """

    def __init__(self, job: str, event: object | None) -> None:
        self.job = job
        self.event = event
        subject = f"event {type(event).__name__}" if event is not None else "the job's state"
        super().__init__(f"job {job}: internal error: cannot process {subject}")


class ReplayError(EngineError):
    """A decision log is invalid; `line` counts from 1."""

    def __init__(self, line: int, why: str) -> None:
        self.line = line
        super().__init__(f"decision log, line {line}: {why}")


__all__ = ["EngineError", "JobFault", "ReplayError", "UnknownJob"]

"""What the engine refuses."""

from __future__ import annotations


class EngineError(Exception):
    """Base of what the engine raises; never raised half-way through a step."""


class UnknownJob(EngineError):  # noqa: N818 - a fact that callers name
    """A question about a job that the engine does not know."""

    def __init__(self, job: str, known: int) -> None:
        self.job = job
        super().__init__(
            f"job {job} is not known here ({known} jobs are): list them with `flyer ps`"
        )


class ReplayError(EngineError):
    """A decision log that cannot be read; `line` counts from 1."""

    def __init__(self, line: int, why: str) -> None:
        self.line = line
        super().__init__(f"decision log, line {line}: {why}")


__all__ = ["EngineError", "ReplayError", "UnknownJob"]

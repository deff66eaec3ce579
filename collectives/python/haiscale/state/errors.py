"""Errors of a job's state."""

from __future__ import annotations

__all__ = ["StateMismatchError"]


class StateMismatchError(ValueError):
    """A checkpoint of another model, optimizer or data order; nothing was changed.

    `name` is the first parameter, buffer or setting that differs; `found` is what the checkpoint
    has, and `expected` what the job has. Raised on every rank.
    """

    def __init__(self, checkpoint: str, name: str, found: str, expected: str) -> None:
        super().__init__(
            f"{checkpoint} is of another job: {name}: found {found}, expected {expected}: load a "
            "checkpoint of this model, or start with a new folder"
        )
        self.checkpoint, self.name = checkpoint, name
        self.found, self.expected = found, expected

    def __reduce__(self) -> tuple[type[StateMismatchError], tuple[str, ...]]:
        """Ranks send it to each other."""
        return type(self), (self.checkpoint, self.name, self.found, self.expected)

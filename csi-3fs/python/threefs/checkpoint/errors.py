"""Exceptions of checkpoints."""

__all__ = [
    "CheckpointBusyError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointSupersededError",
]


class CheckpointError(Exception):
    """A save or a load failed; the message names checkpoint, reason and missing ranks."""


class CheckpointBusyError(CheckpointError):
    """The previous save is still being written: the new save was not started."""


class CheckpointDamagedError(CheckpointError):
    """The stored data differs from the saved data: truncated, torn, altered or incomplete."""


class CheckpointSupersededError(CheckpointError):
    """A later attempt of the job has started: this attempt commits nothing more."""


class CheckpointNotFoundError(CheckpointError):
    """No complete checkpoint (of that step) exists."""

"""What can go wrong with checkpoints, as types."""

__all__ = [
    "CheckpointBusyError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointSupersededError",
]


class CheckpointError(Exception):
    """A checkpoint was not saved or not loaded; the text says which, why, and who is missing."""


class CheckpointBusyError(CheckpointError):
    """The save before this one is still being written: nothing was begun."""


class CheckpointDamagedError(CheckpointError):
    """What is stored is not what was saved: truncated, torn, altered or incomplete."""


class CheckpointSupersededError(CheckpointError):
    """A later attempt of the job has begun: nothing of this one is committed any more."""


class CheckpointNotFoundError(CheckpointError):
    """There is no complete checkpoint (of that step)."""

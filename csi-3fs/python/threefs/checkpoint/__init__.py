"""Checkpoints: saved behind the training's back, durable as a whole or not there at all.

`CheckpointManager` over `threefs.Client` or a plain directory (`LocalFiles`). What the manifest
of a checkpoint does not name does not exist; what it names is durable.
"""

from threefs.checkpoint.digest import digest
from threefs.checkpoint.errors import (
    CheckpointBusyError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
)
from threefs.checkpoint.files import Files, LocalFiles
from threefs.checkpoint.loading import Loaded, LoadReport, Skipped
from threefs.checkpoint.manager import CheckpointManager
from threefs.checkpoint.saving import SaveHandle

__all__ = [
    "CheckpointBusyError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointSupersededError",
    "Files",
    "LoadReport",
    "Loaded",
    "LocalFiles",
    "SaveHandle",
    "Skipped",
    "digest",
]

"""Checkpoints: saved asynchronously, and committed atomically and durably.

`CheckpointManager` works over `threefs.Client` or a plain directory (`LocalFiles`). A checkpoint
consists of the files that its manifest names; all of them are durable. For
`torch.distributed.checkpoint` there is `threefs.checkpoint.distributed`.
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

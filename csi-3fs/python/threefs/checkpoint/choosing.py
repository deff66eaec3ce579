"""Choice of the checkpoint that all ranks load: rank 0 verifies, chooses and publishes it.

If every rank chose for itself, a rank that found damage would load an older step than the others.
Rank 0 therefore verifies every byte, including the state of the other ranks, and writes its choice
to a folder of this load. The other ranks load exactly that checkpoint or fail.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from threefs.checkpoint.errors import CheckpointError
from threefs.checkpoint.loading import Skipped
from threefs.checkpoint.names import CHOICE_NAME, choice_folder

if TYPE_CHECKING:
    from threefs.checkpoint.files import Files

__all__ = ["Choice", "await_choice", "publish_choice"]

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.005, 0.5


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of rank 0."""

    path: str | None
    """The checkpoint's folder; None if no checkpoint can be loaded."""
    skipped: list[Skipped] = field(default_factory=list)
    """Newer checkpoints that are damaged."""
    error: str = ""
    """Reason why rank 0 could not choose."""

    def encode(self) -> bytes:
        """One JSON object."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Choice | None:
        """None while it is not complete."""
        try:
            body = json.loads(data)
            return cls(
                body["path"], [Skipped(**entry) for entry in body["skipped"]], str(body["error"])
            )
        except (ValueError, TypeError, KeyError):
            return None


def publish_choice(files: Files, folder: str, load: str, choice: Choice) -> None:
    """Publish the choice to the other ranks, once."""
    at = f"{folder}/{choice_folder(load)}"
    files.mkdir(at, parents=True, exist_ok=True)
    files.write_file(f"{at}/{CHOICE_NAME}", choice.encode())


def await_choice(files: Files, folder: str, load: str, seconds_max: float) -> Choice:
    """On other ranks: wait until rank 0 has published its choice."""
    deadline = time.monotonic() + seconds_max
    path = f"{folder}/{choice_folder(load)}/{CHOICE_NAME}"
    pause_seconds = POLL_SECONDS_MIN
    while True:
        try:
            choice = Choice.decode(files.read_file(path))
        except (FileNotFoundError, NotADirectoryError):
            choice = None
        if choice is not None:
            return choice
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank 0 has not chosen a checkpoint in {folder} after {seconds_max:g} s; every "
                "rank has to call `load` alike, and `load_seconds_max` has to cover the time in "
                "which rank 0 reads all of it"
            )
        time.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 1.5, POLL_SECONDS_MAX)

"""File with the key of a job's collectives: readable only by its owner, not in an environment.

HFReduce reads it through HFREDUCE_KEY_FILE. Without it rank 0 publishes a key in torch's store,
which every host on the network can read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KEY_FILE", "KEY_FILE_VARIABLE", "write_private"]

KEY_FILE: Final = "hfreduce.key"
KEY_FILE_VARIABLE: Final = "HFREDUCE_KEY_FILE"


def write_private(path: Path, text: str) -> None:
    """Replace the file by rename; it has mode 0600 from its creation on. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # left by a writer that died, perhaps with another mode
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(partial, flags, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)

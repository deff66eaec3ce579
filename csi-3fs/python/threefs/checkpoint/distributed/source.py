"""Storage that a writer or reader was given; opened in the process that uses it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from threefs.checkpoint.errors import CheckpointError
from threefs.checkpoint.files import LocalFiles

if TYPE_CHECKING:
    from threefs.checkpoint.files import Files

__all__ = ["FilesSource"]


class FilesSource:
    """A `Files`, or the path of a `cluster.json`, which is connected to when it is first used."""

    def __init__(self, files: Files | str | os.PathLike[str] | None) -> None:
        self._given = files
        self._connected: dict[int, Files] = {}

    def open(self) -> Files:
        """Return the storage; a forked process gets a separate connection."""
        given = self._given
        if given is not None and not isinstance(given, str | os.PathLike):
            return given
        process = os.getpid()
        if process not in self._connected:
            from threefs.client import connect

            self._connected[process] = connect(given)
        return self._connected[process]

    def __getstate__(self) -> dict[str, Any]:
        given = self._given
        if not (given is None or isinstance(given, str | os.PathLike | LocalFiles)):
            raise CheckpointError(
                f"a {type(given).__name__} cannot be sent to another process: give ThreeFSWriter "
                "the path of cluster.json instead"
            )
        return {"_given": given, "_connected": {}}

"""Notifies of files created in or removed from a folder: inotify through the C library.

inotify can miss changes (a replaced folder, a full queue), so callers also check every second.
Without inotify only these checks remain.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FolderWatch"]

IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE, IN_DELETE_SELF = 0x40, 0x80, 0x100, 0x200, 0x400
MASK = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF


class FolderWatch:
    """Calls `wake` after changes; `renew` must be called now and then."""

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        self._folder = folder
        self._wake = wake
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor >= 0:
            asyncio.get_running_loop().add_reader(self._descriptor, self._ready)

    def renew(self) -> None:
        """Watches what is at the path now; asking again for the same folder costs nothing."""
        if self._descriptor >= 0:
            path = os.fsencode(self._folder)
            self._library.inotify_add_watch(self._descriptor, path, ctypes.c_uint32(MASK))

    def close(self) -> None:
        """Ends."""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _ready(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 65536)
        self._wake()

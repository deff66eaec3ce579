"""Kernel log reader: follows /dev/kmsg from its end, one record per read.

Records that processes wrote to /dev/kmsg have another facility than the kernel's and are skipped. A
FIFO with lines of the same format works too. Records that were overwritten before they were read
are counted. A missing file is not an error: driver events report the same Xids, without processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["KernelLog"]

RECORD_BYTES_MAX = 8192
"""Maximum size of a record (CONSOLE_EXT_LOG_MAX of the kernel)."""
RECORDS_PER_WAKEUP = 256
"""Bounds the time that a burst of records holds the event loop."""
RECORD = re.compile(r"([0-9]{1,10}),[^;]*;(.*)", re.DOTALL)
"""`priority,sequence,time,flags;text`; continuation lines start with a space."""
LEVEL_BITS = 3
"""The facility of a priority lies above its level (syslog.h); 0 is the kernel's."""


class KernelLog:
    """Calls `on_line` with the text of each new record written by the kernel."""

    def __init__(
        self,
        path: Path,
        on_line: Callable[[str], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._on_line = on_line
        self._on_lost = on_lost
        self._descriptor = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> str:
        """Starts reading; returns the reason of a failure, or an empty string."""
        self._loop = asyncio.get_running_loop()
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a FIFO cannot seek
                os.lseek(self._descriptor, 0, os.SEEK_END)
            self._loop.add_reader(self._descriptor, self._ready)
        except OSError as error:
            self.stop()
            return f"{self._path}: {error.strerror}"
        return ""

    def stop(self) -> None:
        """Stops reading."""
        if self._descriptor >= 0:
            assert self._loop is not None
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _ready(self) -> None:
        for _ in range(RECORDS_PER_WAKEUP):
            try:
                record = os.read(self._descriptor, RECORD_BYTES_MAX)
            except BlockingIOError:
                return
            except BrokenPipeError:  # EPIPE: overwritten; the next read continues after the gap
                self._on_lost()
                continue
            except OSError:
                self.stop()
                return
            if not record:
                # End of a FIFO whose writers closed it; /dev/kmsg never ends.
                self.stop()
                return
            for line in record.decode(errors="replace").split("\n"):
                match = RECORD.fullmatch(line)
                if match and int(match[1]) >> LEVEL_BITS == 0:
                    self._on_line(match[2])

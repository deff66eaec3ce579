"""The kernel's log as it grows: /dev/kmsg, one record a read, from now on.

Processes write into /dev/kmsg as well; the kernel gives their records a facility other than its
own, and those are left out. A FIFO of the same lines works too. Records that were overwritten
before they were read are counted; that the file is missing is a finding, not an error: the driver's
events report the same without processes.
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
"""The kernel's bound on a record (CONSOLE_EXT_LOG_MAX)."""
RECORDS_A_TURN = 256
"""So a storm of lines leaves time for everything else."""
RECORD = re.compile(r"([0-9]{1,10}),[^;]*;(.*)", re.DOTALL)
"""`priority,sequence,time,flags;text`; continuation lines begin with a blank."""
LEVEL_BITS = 3
"""The facility of a priority lies above its level (syslog.h); 0 is the kernel's."""


class KernelLog:
    """Calls `on_line` with the text of every new record that the kernel itself wrote."""

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
        """Begins; returns why it cannot, or nothing."""
        self._loop = asyncio.get_running_loop()
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # a FIFO has no end to go to
                os.lseek(self._descriptor, 0, os.SEEK_END)
            self._loop.add_reader(self._descriptor, self._ready)
        except OSError as error:
            self.stop()
            return f"{self._path}: {error.strerror}"
        return ""

    def stop(self) -> None:
        """Ends."""
        if self._descriptor >= 0:
            assert self._loop is not None
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _ready(self) -> None:
        for _ in range(RECORDS_A_TURN):
            try:
                record = os.read(self._descriptor, RECORD_BYTES_MAX)
            except BlockingIOError:
                return
            except BrokenPipeError:  # EPIPE: overwritten; the next read goes on after the gap
                self._on_lost()
                continue
            except OSError:
                self.stop()
                return
            if not record:
                # All writers of a FIFO have closed it; the end of a real log never comes.
                self.stop()
                return
            for line in record.decode(errors="replace").split("\n"):
                found = RECORD.fullmatch(line)
                if found and int(found[1]) >> LEVEL_BITS == 0:
                    self._on_line(found[2])

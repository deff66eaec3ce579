"""Unmounting: clean, after a flush of dirty data where that is required, or by detaching.

Invariant: a descriptor is closed only after its mount has ended, or to abort a mount that does not
answer. Every step is a child process with a deadline, or does not wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import fuse_connections, mountinfo, syscalls
from .protocol import Refused
from .writeback import Writeback

if TYPE_CHECKING:
    from .daemon import Daemon
    from .daemon_factory import DaemonFactory
    from .fd_store import FdStoreClient
    from .mount_table import ManagedMount, MountTable
    from .mountinfo import MountEntry

__all__ = [
    "DETACH_SECONDS",
    "WRITEBACK_TIMEOUT_SECONDS",
    "UnmountOutcome",
    "Unmounter",
    "call",
]

UNMOUNT_SECONDS = 2.0
"""Timeout of a clean unmount; then the mount is detached. With the mount's timeouts it stays below
the five seconds that an unmount request may take in all."""
DETACH_SECONDS = 1.5
FLUSH_SECONDS = 1.5
"""Time for which one request waits for dirty data to be written; then its caller retries."""
WRITEBACK_TIMEOUT_SECONDS = 120.0
"""Time for which callers have to retry before a mount with dirty data is detached."""

RESULTS = ("none", "clean", "unverified", "detached")
"""Results, best first."""


@dataclass(frozen=True, slots=True)
class UnmountOutcome:
    """Result of an unmount: `none` (nothing mounted), `clean`, `unverified` or `detached`.

    `unverified`: synced and unmounted, but the kernel does not show whether all requests were
    answered.
    """

    result: str
    data_lost: str = ""
    """Why dirty data may be lost; empty if none is."""

    def combine(self, other: UnmountOutcome) -> UnmountOutcome:
        """Return the outcome of several mounts at one target: the worst of them."""
        worst = max(self.result, other.result, key=RESULTS.index)
        return UnmountOutcome(worst, self.data_lost or other.data_lost)


class Unmounter:
    """Unmounts the mounts of one manager. Callers run one call at a time for a target."""

    def __init__(
        self,
        table: MountTable,
        daemons: DaemonFactory,
        fd_store: FdStoreClient,
        writeback_timeout_seconds: float,
    ) -> None:
        self._table = table
        self._daemons = daemons
        self._fd_store = fd_store
        self._writeback_timeout_seconds = writeback_timeout_seconds
        self._writebacks: dict[str, Writeback] = {}

    def unmount(self, entry: MountEntry) -> UnmountOutcome:
        """Unmount one entry of the mount table."""
        managed = self._table.get(entry.target)
        if managed is None or managed[0].device != entry.device:
            return _unmount_unmanaged(entry, orphan=not self._table.has_device(entry.device))
        mount, daemon = managed
        elsewhere = [
            other.target
            for other in mountinfo.read()
            if other.device == mount.device and other.target != mount.target
        ]
        if elsewhere:
            raise Refused(
                "busy",
                f"`{mount.volume}` is still mounted at {', '.join(elsewhere[:3])}; unpublish first",
            )
        state = daemon.report().state
        if mount.is_write_back and state != "ended":
            return self._unmount_write_back(mount, daemon, state)
        data_lost = "its connection had ended" if mount.is_write_back else ""
        return self.unmount_managed(mount, daemon, at_once=state != "serving", data_lost=data_lost)

    def _unmount_write_back(
        self, mount: ManagedMount, daemon: Daemon, state: str
    ) -> UnmountOutcome:
        """Unmount a mount with dirty data; refused until the data is written or the time is over.

        This includes mounts without a serving daemon: a daemon that starts, or is continued,
        writes the data.
        """
        writeback = self._writebacks.setdefault(mount.target, Writeback(mount.target, mount.device))
        reason = writeback.flush(FLUSH_SECONDS)
        if not reason:
            try:
                syscalls.call("unmount", mount.target, timeout=UNMOUNT_SECONDS)
            except syscalls.TimedOut:
                reason = f"unmounting takes over {UNMOUNT_SECONDS:g} s"
            except OSError as error:
                reason = f"unmounting: {error.strerror}"
            else:
                clean = self._end(mount, daemon, at_once=False)
                _log_data_lost(mount, writeback.error)
                result = "unverified" if writeback.unverified else "clean"
                return UnmountOutcome(result if clean else "detached", writeback.error)
        reason = f"{reason}; its daemon is {state}"
        self._refuse_while_dirty(mount, writeback, reason)
        return self.unmount_managed(
            mount, daemon, at_once=True, data_lost=writeback.error or reason
        )

    def _refuse_while_dirty(self, mount: ManagedMount, writeback: Writeback, reason: str) -> None:
        """Refuse until the writeback timeout has passed."""
        if not writeback.is_timed_out(self._writeback_timeout_seconds):
            raise Refused(
                "dirty",
                f"`{mount.volume}` at `{mount.target}` may have data that is not in 3FS yet "
                f"({reason}); after {self._writeback_timeout_seconds:g} s of retries it is "
                "detached without writing the data",
            )

    def unmount_managed(
        self, mount: ManagedMount, daemon: Daemon, *, at_once: bool, data_lost: str = ""
    ) -> UnmountOutcome:
        """Unmount a managed mount without flushing dirty data."""
        result = "detached"
        if not at_once:
            with contextlib.suppress(syscalls.TimedOut, OSError):
                syscalls.call("unmount", mount.target, timeout=UNMOUNT_SECONDS)
                result = "clean"
        if result == "detached":
            # Without a daemon and a descriptor the kernel ends the connection: no request waits
            # on it any longer, so detaching cannot block either.
            fuse_connections.abort(mount.device)
            self._end(mount, daemon, at_once=True)
            with contextlib.suppress(syscalls.TimedOut, OSError):
                syscalls.call("detach", mount.target, timeout=DETACH_SECONDS)
        elif not self._end(mount, daemon, at_once=False):
            # Its last reports to 3FS are lost, or a program may still write.
            result = "detached"
        _log_data_lost(mount, data_lost)
        return UnmountOutcome(result, data_lost)

    def _end(self, mount: ManagedMount, daemon: Daemon, *, at_once: bool) -> bool:
        """End a mount's daemon; return True if it ended by itself and cleanly."""
        self.cancel_writeback(mount.target)
        clean = daemon.stop(at_once=at_once)
        self._table.delete(mount.target)
        # First: the kernel ends a mount when its last descriptor is closed.
        self._fd_store.delete(mount.target)
        os.close(mount.descriptor)
        self._daemons.state_file(mount).unlink(missing_ok=True)
        return clean

    def forget(self, target: str) -> UnmountOutcome | None:
        """End the daemon of a mount that has left the mount table; None if there is none."""
        managed = self._table.get(target)
        if managed is None:
            return None
        mount, daemon = managed
        reason = ""
        if mount.is_write_back and not daemon.is_unmounted():
            # An unmount that timed out may still write, or another mount namespace may have a
            # copy of the mount that cannot be reached here.
            writeback = self._writebacks.setdefault(target, Writeback(target, mount.device))
            reason = writeback.wait_for_replies(FLUSH_SECONDS)
            if reason:
                self._refuse_while_dirty(mount, writeback, reason)
        if not reason and target in self._writebacks:
            reason = self._writebacks[target].error
        self._end(mount, daemon, at_once=True)
        _log_data_lost(mount, reason)
        return UnmountOutcome("detached", reason)

    def cancel_writeback(self, target: str) -> None:
        """Reset the writeback of a target that is in use again or no longer exists."""
        writeback = self._writebacks.pop(target, None)
        if writeback is not None:
            writeback.cancel()


def _log_data_lost(mount: ManagedMount, reason: str) -> None:
    if reason:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{mount.volume}: detached, data not written: {reason}\n")


def _unmount_unmanaged(entry: MountEntry, *, orphan: bool) -> UnmountOutcome:
    """Unmount a bind mount, or an orphan, whose manager has died and which never ends clean.

    Data that an orphan's daemon had accepted and not written yet is lost.
    """
    if orphan:
        fuse_connections.abort(entry.device)
    with contextlib.suppress(syscalls.TimedOut, OSError):
        syscalls.call("unmount", entry.target, timeout=UNMOUNT_SECONDS)
        return UnmountOutcome("detached" if orphan else "clean")
    call("detach", entry.target, timeout=DETACH_SECONDS)
    return UnmountOutcome("detached")


def call(operation: str, *arguments: str, timeout: float, keep: tuple[int, ...] = ()) -> None:
    """Run one mount call as `syscalls.call`; a failure raises `Refused`."""
    try:
        syscalls.call(operation, *arguments, timeout=timeout, keep=keep)
    except syscalls.TimedOut as error:
        raise Refused("failed", str(error)) from error
    except OSError as error:
        hint = ""
        if error.errno in (errno.EPERM, errno.EACCES):
            hint = "; the mount manager needs CAP_SYS_ADMIN and /dev/fuse"
        raise Refused("failed", f"{operation} {arguments[-1]}: {error.strerror}{hint}") from error

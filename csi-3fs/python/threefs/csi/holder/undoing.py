"""How a mount ends: cleanly, written out before where that is owed, or taken away from what hangs.

Invariant: a descriptor is closed only after its mount was undone, or to abort one that does not
answer. Every step is a child with a deadline or no wait at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import connections, mountinfo, syscalls
from .protocol import Refused
from .writing import Writing

if TYPE_CHECKING:
    from .daemon import Daemon
    from .daemons import Daemons
    from .held import Held, Table
    from .keeper import KeeperClient
    from .mountinfo import Mount

__all__ = ["DETACH_SECONDS", "PATIENCE_SECONDS", "Ended", "Undoing", "call"]

UNMOUNT_SECONDS = 2.0
"""A clean unmount; then the mount is detached. With a mount's seconds below the five that undoing
may take in all."""
DETACH_SECONDS = 1.5
SYNC_SECONDS = 1.5
"""How long one call waits for written-behind data; then its caller asks again."""
PATIENCE_SECONDS = 120.0
"""For so long callers are told to ask again, before a mount is undone without its data."""

HOW = ("none", "clean", "unseen", "detached")
"""The better first."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a mount ended: `none` was there, `clean`, `unseen` or `detached`; why data may be lost.

    `unseen`: as cleanly as can be told where the kernel does not say whether all was answered.
    """

    how: str
    unwritten: str = ""

    def and_then(self, other: Ended) -> Ended:
        """How several mounts at one place were undone: as well as the worst of them."""
        return Ended(max(self.how, other.how, key=HOW.index), self.unwritten or other.unwritten)


class Undoing:
    """Ends mounts of one holder. Its callers let one call at a time to a place."""

    def __init__(
        self, table: Table, daemons: Daemons, keeper: KeeperClient, patience_seconds: float
    ) -> None:
        self._table = table
        self._daemons = daemons
        self._keeper = keeper
        self._patience_seconds = patience_seconds
        self._writings: dict[str, Writing] = {}

    def undo(self, mount: Mount) -> Ended:
        """Undo one line of the mount table."""
        known = self._table.get(mount.target)
        if known is None or known[0].device != mount.device:
            return _undo_other(mount, orphan=not self._table.has_device(mount.device))
        held, daemon = known
        elsewhere = [
            other.target
            for other in mountinfo.read()
            if other.device == held.device and other.target != held.target
        ]
        if elsewhere:
            raise Refused(
                "busy",
                f"`{held.volume}` is still mounted at {', '.join(elsewhere[:3])}; unpublish first",
            )
        state = daemon.report().state
        if held.is_written_behind and state != "ended":
            return self._undo_written_behind(held, daemon, state)
        unwritten = "its connection had ended" if held.is_written_behind else ""
        return self.undo_held(held, daemon, at_once=state != "serving", unwritten=unwritten)

    def _undo_written_behind(self, held: Held, daemon: Daemon, state: str) -> Ended:
        """Undo what may have data that is not in 3FS yet; refused while there is hope for it.

        Also without a daemon that serves: one that starts, or is continued, goes on with the data.
        """
        writing = self._writings.setdefault(held.target, Writing(held.target, held.device))
        reason = writing.out(SYNC_SECONDS)
        if not reason:
            try:
                syscalls.call("unmount", held.target, timeout=UNMOUNT_SECONDS)
            except syscalls.TimedOut:
                reason = f"unmounting takes over {UNMOUNT_SECONDS:g} s"
            except OSError as error:
                reason = f"unmounting: {error.strerror}"
            else:
                gently = self._end(held, daemon, at_once=False)
                _tell_lost(held, writing.lost)
                how = "unseen" if writing.unseen else "clean"
                return Ended(how if gently else "detached", writing.lost)
        self._ask_again(held, writing, f"{reason}; its daemon is {state}")
        told = f"{reason}; its daemon is {state}"
        return self.undo_held(held, daemon, at_once=True, unwritten=writing.lost or told)

    def _ask_again(self, held: Held, writing: Writing, reason: str) -> None:
        """Refuse, until the patience is over."""
        if not writing.is_over(self._patience_seconds):
            raise Refused(
                "unwritten",
                f"`{held.volume}` at `{held.target}` may have data that is not in 3FS yet "
                f"({reason}); asked for {self._patience_seconds:g} s, it is undone without",
            )

    def undo_held(self, held: Held, daemon: Daemon, *, at_once: bool, unwritten: str = "") -> Ended:
        """Undo a mount that is held, without writing out what was written behind."""
        how = "detached"
        if not at_once:
            with contextlib.suppress(syscalls.TimedOut, OSError):
                syscalls.call("unmount", held.target, timeout=UNMOUNT_SECONDS)
                how = "clean"
        if how == "detached":
            # Without a daemon and a descriptor the kernel ends the connection: nothing on it waits
            # any longer, so taking it out of the tree cannot wait either.
            connections.abort(held.device)
            self._end(held, daemon, at_once=True)
            with contextlib.suppress(syscalls.TimedOut, OSError):
                syscalls.call("detach", held.target, timeout=DETACH_SECONDS)
        elif not self._end(held, daemon, at_once=False):
            how = "detached"  # What it had still to tell is lost, or somebody may still write.
        _tell_lost(held, unwritten)
        return Ended(how, unwritten)

    def _end(self, held: Held, daemon: Daemon, *, at_once: bool) -> bool:
        """End a mount's daemon; true if it ended by itself and left nothing open."""
        self.stop_writing(held.target)
        gently = daemon.stop(at_once=at_once)
        self._table.drop(held.target)
        # First: the kernel ends a mount when nobody has its descriptor any more.
        self._keeper.drop(held.target)
        os.close(held.descriptor)
        self._daemons.state_file(held).unlink(missing_ok=True)
        return gently

    def forget(self, target: str) -> Ended | None:
        """Its mount is not there any more: end its daemon; none if there was none."""
        known = self._table.get(target)
        if known is None:
            return None
        held, daemon = known
        reason = ""
        if held.is_written_behind and not daemon.is_unmounted():
            # An unmount that was given up may still write, or others may have it in a place of
            # their own, out of reach here.
            writing = self._writings.setdefault(target, Writing(target, held.device))
            reason = writing.answered(SYNC_SECONDS)
            if reason:
                self._ask_again(held, writing, reason)
        if not reason and target in self._writings:
            reason = self._writings[target].lost
        self._end(held, daemon, at_once=True)
        _tell_lost(held, reason)
        return Ended("detached", reason)

    def stop_writing(self, target: str) -> None:
        """In use again, or gone: its end may be asked for as patiently as the first time."""
        writing = self._writings.pop(target, None)
        if writing is not None:
            writing.end()


def _tell_lost(held: Held, unwritten: str) -> None:
    if unwritten:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{held.volume}: detached, data not written: {unwritten}\n")


def _undo_other(mount: Mount, *, orphan: bool) -> Ended:
    """A second place of a mount, or a mount whose holder has died, which never ends clean.

    What that had taken and not yet written is lost.
    """
    if orphan:
        connections.abort(mount.device)
    with contextlib.suppress(syscalls.TimedOut, OSError):
        syscalls.call("unmount", mount.target, timeout=UNMOUNT_SECONDS)
        return Ended("detached" if orphan else "clean")
    call("detach", mount.target, timeout=DETACH_SECONDS)
    return Ended("detached")


def call(operation: str, *arguments: str, timeout: float, keep: tuple[int, ...] = ()) -> None:
    """One call about a mount, as `syscalls.call`; what failed is refused."""
    try:
        syscalls.call(operation, *arguments, timeout=timeout, keep=keep)
    except syscalls.TimedOut as error:
        raise Refused("failed", str(error)) from error
    except OSError as error:
        hint = ""
        if error.errno in (errno.EPERM, errno.EACCES):
            hint = "; the holder needs CAP_SYS_ADMIN and /dev/fuse"
        raise Refused("failed", f"{operation} {arguments[-1]}: {error.strerror}{hint}") from error

"""The mounts of this node: made, shown at more places, undone, listed, handed over.

Invariant: a descriptor is closed only after its mount was undone, or to abort one that does not
answer. Nothing here opens, stats or lists a path inside a mount: the table is read from
/proc/self/mountinfo and mount calls run in children with a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from . import connections, mountinfo, syscalls
from .daemon import Daemon
from .protocol import Refused
from .writing import Writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .keeper import KeeperClient
    from .mountinfo import Mount

__all__ = ["PATIENCE_SECONDS", "Held", "Mounts"]

READY_SECONDS = 15.0
"""How long `mount` waits for the daemon; shorter than the callers' own deadlines."""
MOUNT_SECONDS = 3.0
UNMOUNT_SECONDS = 2.0
"""A clean unmount; then the mount is detached. With `MOUNT_SECONDS` below the five seconds that
undoing may take in all."""
DETACH_SECONDS = 1.5
LOCK_SECONDS = 1.0
SYNC_SECONDS = 1.5
"""How long one call waits for written-behind data; then its caller asks again."""
PATIENCE_SECONDS = 120.0
"""For so long callers are told to ask again, before a mount is undone without its data."""


@dataclass(frozen=True, slots=True)
class Held:
    """A mount whose descriptor is here."""

    volume: str
    cluster: str
    root: str
    target: str
    read_only: bool
    device: str
    descriptor: int
    node: str = ""
    """The node that claims the volume, if only one node may use it at a time."""

    @property
    def is_written_behind(self) -> bool:
        """Whether the kernel may have data that is not in 3FS yet: nobody else has the files."""
        return bool(self.node) and not self.read_only


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


class Mounts:
    """All mounts of one holder; thread-safe."""

    def __init__(
        self,
        kubelet_dir: Path,
        clusters: Path,
        states: Path,
        daemon_command: list[str],
        keeper: KeeperClient,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._writings: dict[str, Writing] = {}
        self._kubelet_dir = str(kubelet_dir)
        self._states = states
        self._clusters = clusters
        self._daemon_command = daemon_command
        self._keeper = keeper
        self._held: dict[str, tuple[Held, Daemon]] = {}
        self._busy: set[str] = set()
        self._changed = threading.Condition()
        self._leaving = False

    # What can be asked

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> dict[str, Any]:
        """Mount a directory of a cluster at a new place and serve it."""
        self._check_target("target", target)
        cluster_file = self._cluster_file(cluster)
        with self._only(target):
            if (known := self._held.get(target)) is not None:
                if known[1].report().state != "ended":
                    return self._same(known, volume, root, read_only=read_only)
                # Somebody else has unmounted it, or ended its connection.
                unwritten = "its connection had ended" if known[0].is_written_behind else ""
                self._undo_held(*known, at_once=True, unwritten=unwritten)
            self._clear_the_way(target, volume)
            held = self._mount(volume, cluster, root, target, read_only=read_only)
            held = replace(held, node=node)
            # The kernel gives the numbers of ended mounts again.
            self._state_file(held).unlink(missing_ok=True)
            connections.read_further_ahead(held.device)
            daemon = Daemon(self._command(held, cluster_file), held.descriptor, volume)
            with self._changed:
                self._held[target] = (held, daemon)
            daemon.start(resume=False)
            if not daemon.wait_ready(READY_SECONDS):
                report = daemon.report()
                self._undo_held(held, daemon, at_once=True)
                raise Refused(
                    "failed",
                    f"the FUSE daemon of `{volume}` does not serve ({report.state}): "
                    f"{report.message or 'no answer from 3FS'}",
                )
            self._keeper.keep(held)
            return {"already": False}

    def bind(
        self, source: str, target: str, *, read_only: bool, flags: list[str]
    ) -> dict[str, Any]:
        """Show a mount at a second place."""
        self._check_target("source", source)
        self._check_target("target", target)
        unknown = [flag for flag in flags if flag not in syscalls.FLAGS]
        if unknown:
            raise Refused("invalid", f"flag `{unknown[0]}` is not known")
        with self._only(target):
            table = mountinfo.read()
            at_source = [mount for mount in table if mount.target == source]
            if not at_source or at_source[-1].volume is None:
                raise Refused("conflict", f"nothing of 3FS is mounted at `{source}`")
            there = [mount for mount in table if mount.target == target]
            if there:
                if there[-1].device != at_source[-1].device:
                    raise Refused("conflict", f"{_named(there[-1])} is mounted at `{target}`")
                if there[-1].read_only != (read_only or at_source[-1].read_only):
                    how = "read-only" if there[-1].read_only else "writable"
                    raise Refused("conflict", f"`{target}` is mounted already, and {how}")
                return {"already": True}
            options = ",".join([*flags, *(["ro"] * read_only)])
            # In use again: its end may be asked for as patiently as the first time.
            self._stop_writing(source)
            _call("bind", source, options, target, timeout=MOUNT_SECONDS)
            return {"already": False}

    def unmount(self, target: str) -> dict[str, Any]:
        """Undo whatever of 3FS is mounted at a place, and remove the place. Bounded in time."""
        self._check_target("target", target)
        with self._only(target):
            was, ended = None, Ended("none")
            while there := [mount for mount in mountinfo.read() if mount.target == target]:
                was = there[-1].volume
                if was is None:
                    raise Refused(
                        "conflict", f"{_named(there[-1])} is mounted at `{target}`: not of 3FS"
                    )
                ended = ended.and_then(self._undo(there[-1]))
            if (forgotten := self._forget(target)) is not None:
                ended = ended.and_then(forgotten)
            with contextlib.suppress(syscalls.TimedOut, OSError):
                syscalls.call("remove", target, timeout=DETACH_SECONDS)
            return {"was": was, **asdict(ended)}

    def state(self) -> dict[str, Any]:
        """The mount table as far as it is 3FS's, and how each daemon is."""
        with self._changed:
            known = list(self._held.values())
        held = [
            {
                "volume": one.volume,
                "target": one.target,
                "device": one.device,
                **asdict(daemon.report()),
            }
            for one, daemon in known
        ]
        inside = f"{self._kubelet_dir}/"
        lines = [
            mount
            for mount in mountinfo.read()
            if mount.volume is not None and mount.target.startswith(inside)
        ]
        mounts = [
            {
                "volume": mount.volume,
                "target": mount.target,
                "device": mount.device,
                "read_only": mount.read_only,
            }
            for mount in lines
        ]
        return {"mounts": mounts, "held": held}

    def count(self) -> int:
        """How many mounts are held."""
        return len(self._held)

    @property
    def leaving(self) -> bool:
        """Whether the mounts were given to another holder, or are about to be."""
        return self._leaving

    # Handing over

    def give_up(self) -> list[Held]:
        """Stop all daemons and refuse calls from now on: another holder takes the mounts."""
        deadline = time.monotonic() + MOUNT_SECONDS + READY_SECONDS
        with self._changed:
            self._leaving = True
            if not self._changed.wait_for(
                lambda: not self._busy, max(0.0, deadline - time.monotonic())
            ):
                self._leaving = False
                raise Refused("again", f"calls are under way for {', '.join(sorted(self._busy))}")
            known = list(self._held.values())
        _together([daemon.stop for _, daemon in known])
        return [held for held, _ in known]

    def gone(self) -> None:
        """The other holder has them: this one keeps nothing."""
        with self._changed:
            known, self._held = list(self._held.values()), {}
        for held, _ in known:
            self._stop_writing(held.target)
            os.close(held.descriptor)

    def take_back(self) -> None:
        """The other holder did not take them after all."""
        with self._changed:
            known = list(self._held.values())
        # First: a call in between would take these mounts for those of a holder that has died.
        self.adopt([held for held, _ in known])
        self._leaving = False

    def adopt(self, given: list[Held]) -> None:
        """Serve mounts whose descriptors came from another holder."""
        for held in given:
            command = self._command(held, self._clusters / held.cluster / "cluster.json")
            daemon = Daemon(command, held.descriptor, held.volume)
            with self._changed:
                self._held[held.target] = (held, daemon)
            daemon.start(resume=True)

    def remind(self) -> None:
        """Make what is kept what is held: the keeper may have begun anew, or missed calls."""
        kept = self._keeper.known()
        if kept is None:
            return
        with self._changed:
            targets = list(self._held)
        for target in {*targets, *kept}:
            # A call for it is under way, or another holder has it: the next time, or never.
            with contextlib.suppress(Refused), self._only(target):
                known = self._held.get(target)
                if known is None:
                    self._left_behind(target, kept.get(target, ""))
                elif known[0].device != kept.get(target):
                    self._keeper.keep(known[0])

    def _left_behind(self, target: str, device: str) -> None:
        """Drop what was undone; take what is still there and was not had from the keeper before.

        Of that nobody else has a descriptor.
        """
        if not any((it.target, it.device) == (target, device) for it in mountinfo.read()):
            self._keeper.drop(target)
            return
        for held in self._keeper.kept():
            if (held.target, held.device) == (target, device):
                self.adopt([held])
            else:
                os.close(held.descriptor)

    def stop(self) -> None:
        """End all daemons: this process is about to end."""
        with self._changed:
            self._leaving = True
            known = list(self._held.values())
        _together([daemon.stop for _, daemon in known])

    # How it is done

    def _same(
        self, known: tuple[Held, Daemon], volume: str, root: str, *, read_only: bool
    ) -> dict[str, Any]:
        held, daemon = known
        if (held.volume, held.root, held.read_only) != (volume, root, read_only):
            how = "read-only" if held.read_only else "writable"
            raise Refused("conflict", f"`{held.target}` is mounted already: `{held.volume}`, {how}")
        self._stop_writing(held.target)
        if not daemon.wait_ready(READY_SECONDS):
            raise Refused("failed", f"the FUSE daemon of `{volume}` is down; it is being replaced")
        return {"already": True}

    def _clear_the_way(self, target: str, volume: str) -> None:
        """A mount of this volume whose holder has died is of no use to anybody: undo it."""
        while there := [mount for mount in mountinfo.read() if mount.target == target]:
            if there[-1].volume != volume:
                raise Refused("conflict", f"{_named(there[-1])} is mounted at `{target}`")
            self._undo(there[-1])

    def _mount(self, volume: str, cluster: str, root: str, target: str, *, read_only: bool) -> Held:
        descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        source = mountinfo.SOURCE_PREFIX + volume
        try:
            _call(
                "fuse",
                str(descriptor),
                source,
                mountinfo.FILE_SYSTEM,
                "ro" if read_only else "",
                target,
                timeout=MOUNT_SECONDS,
                keep=(descriptor,),
            )
        except BaseException:
            os.close(descriptor)
            raise
        there = [mount for mount in mountinfo.read() if mount.target == target]
        if not there or there[-1].source != source:
            os.close(descriptor)
            raise Refused("failed", f"`{target}` is not in the mount table after mounting")
        return Held(volume, cluster, root, target, read_only, there[-1].device, descriptor)

    def _undo(self, mount: Mount) -> Ended:
        known = self._held.get(mount.target)
        if known is None or known[0].device != mount.device:
            return _undo_other(mount, orphan=not self._is_held(mount.device))
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
        return self._undo_held(held, daemon, at_once=state != "serving", unwritten=unwritten)

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
        return self._undo_held(held, daemon, at_once=True, unwritten=writing.lost or told)

    def _ask_again(self, held: Held, writing: Writing, reason: str) -> None:
        """Refuse, until the patience is over."""
        if not writing.is_over(self._patience_seconds):
            raise Refused(
                "unwritten",
                f"`{held.volume}` at `{held.target}` may have data that is not in 3FS yet "
                f"({reason}); asked for {self._patience_seconds:g} s, it is undone without",
            )

    def _undo_held(
        self, held: Held, daemon: Daemon, *, at_once: bool, unwritten: str = ""
    ) -> Ended:
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
        self._stop_writing(held.target)
        gently = daemon.stop(at_once=at_once)
        with self._changed:
            self._held.pop(held.target, None)
        # First: the kernel ends a mount when nobody has its descriptor any more.
        self._keeper.drop(held.target)
        os.close(held.descriptor)
        self._state_file(held).unlink(missing_ok=True)
        return gently

    def _forget(self, target: str) -> Ended | None:
        """Its mount is not there any more: end its daemon; none if there was none."""
        known = self._held.get(target)
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

    def _stop_writing(self, target: str) -> None:
        writing = self._writings.pop(target, None)
        if writing is not None:
            writing.end()

    def _is_held(self, device: str) -> bool:
        with self._changed:
            return any(held.device == device for held, _ in self._held.values())

    def _command(self, held: Held, cluster_file: Path) -> list[str]:
        command = [*self._daemon_command, "--cluster", str(cluster_file), "--root", held.root]
        command += ["--state", str(self._state_file(held))]
        if held.node:
            # Nobody else has the files, so the kernel may write behind.
            command += ["--claim-for", held.node, "--write-back"]
        return [*command, *(["--read-only"] * held.read_only)]

    def _state_file(self, held: Held) -> Path:
        """What one daemon of a mount leaves to the next; beside the socket, as it outlives pods."""
        return self._states / f"mount-{held.device.partition(':')[2]}.state"

    def _cluster_file(self, cluster: str) -> Path:
        if not cluster or "/" in cluster or cluster.startswith("."):
            raise Refused("invalid", f"cluster is {cluster[:80]!r}; it must be a plain name")
        return self._clusters / cluster / "cluster.json"

    def _check_target(self, name: str, path: str) -> None:
        parts = path.split("/")
        inside = path.startswith(f"{self._kubelet_dir}/")
        if not inside or ".." in parts or "." in parts or "" in parts[1:] or "\0" in path:
            raise Refused(
                "invalid", f"{name} is {path[:200]!r}; it must be below {self._kubelet_dir}"
            )

    @contextlib.contextmanager
    def _only(self, target: str) -> Iterator[None]:
        """One call at a time for a place; none while another holder takes over."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._leaving or target not in self._busy, LOCK_SECONDS
            )
            if self._leaving:
                raise Refused("again", "another holder takes over; ask again")
            if not free:
                raise Refused("again", f"another call for `{target}` is under way")
            self._busy.add(target)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(target)
                self._changed.notify_all()


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
    _call("detach", mount.target, timeout=DETACH_SECONDS)
    return Ended("detached")


def _call(operation: str, *arguments: str, timeout: float, keep: tuple[int, ...] = ()) -> None:
    try:
        syscalls.call(operation, *arguments, timeout=timeout, keep=keep)
    except syscalls.TimedOut as error:
        raise Refused("failed", str(error)) from error
    except OSError as error:
        hint = ""
        if error.errno in (errno.EPERM, errno.EACCES):
            hint = "; the holder needs CAP_SYS_ADMIN and /dev/fuse"
        raise Refused("failed", f"{operation} {arguments[-1]}: {error.strerror}{hint}") from error


def _named(mount: Mount) -> str:
    return f"`{mount.volume}`" if mount.volume else f"a {mount.kind} file system"


def _together(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

"""The mounts of this node: made, shown at more places, undone, listed.

Nothing here opens, stats or lists a path inside a mount: the mount table is read from
/proc/self/mountinfo and mount calls run in children with a deadline.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from . import connections, mountinfo, syscalls
from .daemons import Daemons
from .handover import Handover
from .held import MOUNT_SECONDS, READY_SECONDS, Held, Table
from .protocol import Refused
from .undoing import DETACH_SECONDS, PATIENCE_SECONDS, Ended, Undoing, call

if TYPE_CHECKING:
    from pathlib import Path

    from .control_groups import ControlGroups
    from .daemon import Daemon
    from .keeper import KeeperClient
    from .mountinfo import Mount

__all__ = ["Mounts"]


class Mounts:
    """What the holder is asked for; thread-safe."""

    def __init__(
        self,
        kubelet_dir: Path,
        clusters: Path,
        states: Path,
        daemon_command: list[str],
        keeper: KeeperClient,
        patience_seconds: float = PATIENCE_SECONDS,
        groups: ControlGroups | None = None,
    ) -> None:
        self._kubelet_dir = str(kubelet_dir)
        self._keeper = keeper
        self._table = Table()
        self._daemons = Daemons(daemon_command, clusters, states, groups)
        self._undoing = Undoing(self._table, self._daemons, keeper, patience_seconds)
        self.handover = Handover(self._table, self._daemons, keeper, self._undoing)

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> dict[str, Any]:
        """Mount a directory of a cluster at a new place and serve it."""
        self._check_target("target", target)
        self._daemons.check_cluster(cluster)
        with self._table.only(target):
            if (known := self._table.get(target)) is not None:
                if known[1].report().state != "ended":
                    return self._same(known, volume, root, read_only=read_only)
                # Somebody else has unmounted it, or ended its connection.
                unwritten = "its connection had ended" if known[0].is_written_behind else ""
                self._undoing.undo_held(*known, at_once=True, unwritten=unwritten)
            self._clear_the_way(target, volume)
            held = self._mount(volume, cluster, root, target, read_only=read_only)
            held = replace(held, node=node)
            # The kernel gives the numbers of ended mounts again.
            self._daemons.state_file(held).unlink(missing_ok=True)
            connections.read_further_ahead(held.device)
            daemon = self._daemons.of(held)
            self._table.put(held, daemon)
            daemon.start(resume=False)
            if not daemon.wait_ready(READY_SECONDS):
                report = daemon.report()
                self._undoing.undo_held(held, daemon, at_once=True)
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
        with self._table.only(target):
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
            self._undoing.stop_writing(source)
            call("bind", source, options, target, timeout=MOUNT_SECONDS)
            return {"already": False}

    def unmount(self, target: str) -> dict[str, Any]:
        """Undo whatever of 3FS is mounted at a place, and remove the place. Bounded in time."""
        self._check_target("target", target)
        with self._table.only(target):
            was, ended = None, Ended("none")
            while there := [mount for mount in mountinfo.read() if mount.target == target]:
                was = there[-1].volume
                if was is None:
                    raise Refused(
                        "conflict", f"{_named(there[-1])} is mounted at `{target}`: not of 3FS"
                    )
                ended = ended.and_then(self._undoing.undo(there[-1]))
            if (forgotten := self._undoing.forget(target)) is not None:
                ended = ended.and_then(forgotten)
            with contextlib.suppress(syscalls.TimedOut, OSError):
                syscalls.call("remove", target, timeout=DETACH_SECONDS)
            return {"was": was, **asdict(ended)}

    def state(self) -> dict[str, Any]:
        """The mount table as far as it is 3FS's, and how each daemon is."""
        held = [
            {
                "volume": one.volume,
                "target": one.target,
                "device": one.device,
                **asdict(daemon.report()),
            }
            for one, daemon in self._table.all()
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
        return len(self._table.all())

    @property
    def leaving(self) -> bool:
        """Whether the mounts were given to another holder, or are about to be."""
        return self._table.leaving

    def _same(
        self, known: tuple[Held, Daemon], volume: str, root: str, *, read_only: bool
    ) -> dict[str, Any]:
        held, daemon = known
        if (held.volume, held.root, held.read_only) != (volume, root, read_only):
            how = "read-only" if held.read_only else "writable"
            raise Refused("conflict", f"`{held.target}` is mounted already: `{held.volume}`, {how}")
        self._undoing.stop_writing(held.target)
        if not daemon.wait_ready(READY_SECONDS):
            raise Refused("failed", f"the FUSE daemon of `{volume}` is down; it is being replaced")
        return {"already": True}

    def _clear_the_way(self, target: str, volume: str) -> None:
        """A mount of this volume whose holder has died is of no use to anybody: undo it."""
        while there := [mount for mount in mountinfo.read() if mount.target == target]:
            if there[-1].volume != volume:
                raise Refused("conflict", f"{_named(there[-1])} is mounted at `{target}`")
            self._undoing.undo(there[-1])

    def _mount(self, volume: str, cluster: str, root: str, target: str, *, read_only: bool) -> Held:
        descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        source = mountinfo.SOURCE_PREFIX + volume
        try:
            call(
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

    def _check_target(self, name: str, path: str) -> None:
        parts = path.split("/")
        inside = path.startswith(f"{self._kubelet_dir}/")
        if not inside or ".." in parts or "." in parts or "" in parts[1:] or "\0" in path:
            raise Refused(
                "invalid", f"{name} is {path[:200]!r}; it must be below {self._kubelet_dir}"
            )


def _named(mount: Mount) -> str:
    return f"`{mount.volume}`" if mount.volume else f"a {mount.kind} file system"

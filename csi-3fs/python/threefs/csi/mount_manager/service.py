"""Requests of the mount manager: mount, bind, unmount, list.

Nothing here opens, stats or lists a path inside a mount: the mount table is read from
/proc/self/mountinfo, and mount calls run in child processes with a deadline.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from . import fuse_connections, mountinfo, syscalls
from .daemon_factory import DaemonFactory
from .handover import Handover
from .mount_table import MOUNT_SECONDS, READY_SECONDS, ManagedMount, MountTable
from .protocol import Refused
from .read_bytes import read_bytes
from .unmount import (
    DETACH_SECONDS,
    WRITEBACK_TIMEOUT_SECONDS,
    Unmounter,
    UnmountOutcome,
    call,
)

if TYPE_CHECKING:
    from pathlib import Path

    from .cgroups import Cgroups
    from .daemon import Daemon
    from .fd_store import FdStoreClient
    from .mountinfo import MountEntry

__all__ = ["MountService"]


class MountService:
    """Executes the requests of clients; thread-safe."""

    def __init__(
        self,
        kubelet_dir: Path,
        clusters: Path,
        states: Path,
        daemon_command: list[str],
        fd_store: FdStoreClient,
        writeback_timeout_seconds: float = WRITEBACK_TIMEOUT_SECONDS,
        groups: Cgroups | None = None,
    ) -> None:
        self._kubelet_dir = str(kubelet_dir)
        self._fd_store = fd_store
        self._table = MountTable()
        self._daemons = DaemonFactory(daemon_command, clusters, states, groups)
        self._unmounter = Unmounter(self._table, self._daemons, fd_store, writeback_timeout_seconds)
        self.handover = Handover(self._table, self._daemons, fd_store, self._unmounter)

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> dict[str, Any]:
        """Mount a directory of a cluster at a new target and serve it."""
        self._check_path("target", target)
        self._daemons.check_cluster(cluster)
        with self._table.lock(target):
            if (entry := self._table.get(target)) is not None:
                if entry[1].report().state != "ended":
                    return self._check_same(entry, volume, root, read_only=read_only)
                # Another process has unmounted it, or aborted its connection.
                data_lost = "its connection had ended" if entry[0].is_write_back else ""
                self._unmounter.unmount_managed(*entry, at_once=True, data_lost=data_lost)
            self._unmount_orphans(target, volume)
            mount = self._mount_fuse(volume, cluster, root, target, read_only=read_only)
            mount = replace(mount, node=node)
            # The kernel reuses the numbers of ended mounts.
            self._daemons.state_file(mount).unlink(missing_ok=True)
            fuse_connections.set_read_ahead(mount.device)
            daemon = self._daemons.create(mount)
            self._table.put(mount, daemon)
            daemon.start(resume=False)
            if not daemon.wait_ready(READY_SECONDS):
                report = daemon.report()
                self._unmounter.unmount_managed(mount, daemon, at_once=True)
                raise Refused(
                    "failed",
                    f"the FUSE daemon of `{volume}` does not serve ({report.state}): "
                    f"{report.message or 'no answer from 3FS'}",
                )
            self._fd_store.put(mount)
            return {"already_mounted": False}

    def bind(
        self, source: str, target: str, *, read_only: bool, flags: list[str]
    ) -> dict[str, Any]:
        """Bind-mount a mount at a second target."""
        self._check_path("source", source)
        self._check_path("target", target)
        unknown = [flag for flag in flags if flag not in syscalls.FLAGS]
        if unknown:
            raise Refused("invalid", f"unknown flag `{unknown[0]}`")
        with self._table.lock(target):
            table = mountinfo.read()
            at_source = [entry for entry in table if entry.target == source]
            if not at_source or at_source[-1].volume is None:
                raise Refused("conflict", f"no 3FS volume is mounted at `{source}`")
            at_target = [entry for entry in table if entry.target == target]
            if at_target:
                if at_target[-1].device != at_source[-1].device:
                    raise Refused(
                        "conflict", f"{_describe(at_target[-1])} is mounted at `{target}`"
                    )
                if at_target[-1].read_only != (read_only or at_source[-1].read_only):
                    mode = "read-only" if at_target[-1].read_only else "writable"
                    raise Refused("conflict", f"`{target}` is already mounted, and {mode}")
                return {"already_mounted": True}
            options = ",".join([*flags, *(["ro"] * read_only)])
            self._unmounter.cancel_writeback(source)
            call("bind", source, options, target, timeout=MOUNT_SECONDS)
            return {"already_mounted": False}

    def unmount(self, target: str) -> dict[str, Any]:
        """Unmount all 3FS mounts at a target, and remove its directory. Bounded in time."""
        self._check_path("target", target)
        with self._table.lock(target):
            volume, outcome = None, UnmountOutcome("none")
            while entries := [entry for entry in mountinfo.read() if entry.target == target]:
                volume = entries[-1].volume
                if volume is None:
                    raise Refused(
                        "conflict",
                        f"{_describe(entries[-1])} is mounted at `{target}`, not a 3FS volume",
                    )
                outcome = outcome.combine(self._unmounter.unmount(entries[-1]))
            if (forgotten := self._unmounter.forget(target)) is not None:
                outcome = outcome.combine(forgotten)
            with contextlib.suppress(syscalls.TimedOut, OSError):
                syscalls.call("remove", target, timeout=DETACH_SECONDS)
            return {"volume": volume, **asdict(outcome)}

    def state(self) -> dict[str, Any]:
        """Return the 3FS entries of the mount table, and the status of each managed mount."""
        mounts = [
            {
                "volume": mount.volume,
                "target": mount.target,
                "device": mount.device,
                **asdict(daemon.report()),
            }
            for mount, daemon in self._table.all()
        ]
        inside = f"{self._kubelet_dir}/"
        mount_points = [
            {
                "volume": entry.volume,
                "target": entry.target,
                "device": entry.device,
                "read_only": entry.read_only,
            }
            for entry in mountinfo.read()
            if entry.volume is not None and entry.target.startswith(inside)
        ]
        counted = {
            mount.device: read_bytes(self._daemons.state_file(mount))
            for mount, _ in self._table.all()
        }
        # Apart from the mounts, so that node services of earlier releases ignore it.
        reads = {device: read for device, read in counted.items() if read is not None}
        return {"mount_points": mount_points, "mounts": mounts, "read_bytes": reads}

    def count(self) -> int:
        """Return the number of managed mounts."""
        return len(self._table.all())

    @property
    def draining(self) -> bool:
        """Whether the mounts were handed over to another manager, or are about to be."""
        return self._table.draining

    def _check_same(
        self, entry: tuple[ManagedMount, Daemon], volume: str, root: str, *, read_only: bool
    ) -> dict[str, Any]:
        mount, daemon = entry
        if (mount.volume, mount.root, mount.read_only) != (volume, root, read_only):
            mode = "read-only" if mount.read_only else "writable"
            raise Refused(
                "conflict", f"`{mount.target}` is already mounted: `{mount.volume}`, {mode}"
            )
        self._unmounter.cancel_writeback(mount.target)
        if not daemon.wait_ready(READY_SECONDS):
            raise Refused("failed", f"the FUSE daemon of `{volume}` is down; it is being replaced")
        return {"already_mounted": True}

    def _unmount_orphans(self, target: str, volume: str) -> None:
        """Unmount mounts of this volume whose manager has died; they cannot be served again."""
        while entries := [entry for entry in mountinfo.read() if entry.target == target]:
            if entries[-1].volume != volume:
                raise Refused("conflict", f"{_describe(entries[-1])} is mounted at `{target}`")
            self._unmounter.unmount(entries[-1])

    def _mount_fuse(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool
    ) -> ManagedMount:
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
        entries = [entry for entry in mountinfo.read() if entry.target == target]
        if not entries or entries[-1].source != source:
            os.close(descriptor)
            raise Refused("failed", f"`{target}` is not in the mount table after mounting")
        return ManagedMount(
            volume, cluster, root, target, read_only, entries[-1].device, descriptor
        )

    def _check_path(self, name: str, path: str) -> None:
        parts = path.split("/")
        inside = path.startswith(f"{self._kubelet_dir}/")
        if not inside or ".." in parts or "." in parts or "" in parts[1:] or "\0" in path:
            raise Refused(
                "invalid", f"{name} is {path[:200]!r}; it must be below {self._kubelet_dir}"
            )


def _describe(entry: MountEntry) -> str:
    return f"`{entry.volume}`" if entry.volume else f"a {entry.kind} file system"

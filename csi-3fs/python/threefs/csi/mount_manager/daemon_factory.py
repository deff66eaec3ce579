"""FUSE daemons of mounts: their command lines, users, state files and tickets.

A daemon with a ticket runs as a user reserved for its volume, without capabilities
(`threefs.confine`): it can read its own ticket and write its own state file, and nothing else of
the node.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from .daemon import Daemon
from .protocol import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .cgroups import Cgroups
    from .mount_table import ManagedMount

__all__ = ["TICKETS", "DaemonFactory", "daemon_user", "ticket_folder"]

TICKETS = "tickets"
"""Folder of tickets, next to the manager's socket; `threefs.csi.tickets` writes it."""
TICKET_FILE = "ticket"
DIGEST_CHARACTERS = 40
USERS_FIRST, USERS_BITS = 0x7000_0000, 27
"""Ids that no distribution, kubelet user namespace or systemd assigns."""


def ticket_folder(volume: str) -> str:
    """Return the name of the folder with a volume's ticket; volume ids contain slashes."""
    return hashlib.sha256(volume.encode()).hexdigest()[:DIGEST_CHARACTERS]


def daemon_user(volume: str) -> int:
    """Return the user and group id of the daemons of a volume."""
    digest = hashlib.sha256(volume.encode()).digest()
    return USERS_FIRST + (int.from_bytes(digest[:4]) >> (32 - USERS_BITS))


class DaemonFactory:
    """Creates the daemon of a mount; keeps no list of mounts."""

    def __init__(
        self,
        command: list[str],
        clusters: Path,
        states: Path,
        groups: Cgroups | None = None,
    ) -> None:
        self._command = command
        self._groups = groups
        self._clusters = clusters
        self._states = states

    def create(self, mount: ManagedMount) -> Daemon:
        """Return the daemon of a mount, not started yet."""
        cluster, root = self._cluster_and_root(mount)
        command = [*self._command, "--cluster", str(cluster)]
        if self._is_confined(mount):
            self.grant_access(mount)
            command += ["--user", str(daemon_user(mount.volume))]
        command += ["--root", root, "--state", str(self.state_file(mount))]
        if mount.node:
            # No other node has the files, so the kernel may cache writes.
            command += ["--claim-for", mount.node, "--write-back"]
        command += ["--read-only"] * mount.read_only
        group = self._groups.of(ticket_folder(mount.volume)) if self._groups else None
        return Daemon(command, mount.descriptor, mount.volume, group)

    def state_file(self, mount: ManagedMount) -> Path:
        """Return the file in which one daemon of a mount leaves its state to the next.

        It is next to the socket, because mounts outlive pods.
        """
        return self._states / f"mount-{mount.device.partition(':')[2]}.state"

    def grant_access(self, mount: ManagedMount) -> None:
        """Let the daemon's user write its state file and read its ticket, also a renewed one."""
        if not self._is_confined(mount):
            return
        user = daemon_user(mount.volume)
        descriptor = os.open(self.state_file(mount), os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR, 0o600)
        try:
            os.fchown(descriptor, user, user)
        finally:
            os.close(descriptor)
        # The node service writes the ticket, and may be removing it now.
        with suppress(FileNotFoundError):
            folder = self._ticket(mount).parent
            os.chown(folder, 0, user)
            folder.chmod(0o2750)
            for file in (self._ticket(mount), folder / TICKET_FILE):
                os.chown(file, 0, user)
                file.chmod(0o640)

    def sweep_groups(self, mounts: Callable[[], Iterable[ManagedMount]]) -> None:
        """Remove the control groups of volumes that are not managed."""
        if self._groups is not None:
            self._groups.sweep(lambda: {ticket_folder(mount.volume) for mount in mounts()})

    def check_cluster(self, name: str) -> None:
        """Refuse a name that could lead to another folder."""
        if not name or "/" in name or name.startswith("."):
            raise Refused("invalid", f"cluster is {name[:80]!r}; it must be a plain name")

    def _cluster_and_root(self, mount: ManagedMount) -> tuple[Path, str]:
        """Return the daemon's `cluster.json` and the mounted directory in the tree that it reaches.

        With a ticket the volume's directory is the root of the tree. Without a ticket and without
        the cluster's own file, the daemon waits for the ticket, which the node service writes.
        """
        if self._has_key(mount):
            return self._cluster_file(mount), mount.root
        return self._ticket(mount), f"/{mount.root.rpartition('/')[2]}"

    def _has_key(self, mount: ManagedMount) -> bool:
        return self._cluster_file(mount).is_file() and not self._ticket(mount).is_file()

    def _is_confined(self, mount: ManagedMount) -> bool:
        """Whether the daemon leaves root; not with the cluster's key, which only root can read."""
        return os.geteuid() == 0 and not self._has_key(mount)

    def _cluster_file(self, mount: ManagedMount) -> Path:
        return self._clusters / mount.cluster / "cluster.json"

    def _ticket(self, mount: ManagedMount) -> Path:
        return self._states / TICKETS / ticket_folder(mount.volume) / "cluster.json"

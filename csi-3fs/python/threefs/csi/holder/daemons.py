"""The FUSE daemons of mounts: their command lines and users, and what each leaves to the next.

A daemon with a ticket runs as a user of its volume alone, without capabilities (`threefs.confine`):
it reads its own ticket and writes its own state file, and nothing else of the node.
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

    from .control_groups import ControlGroups
    from .held import Held

__all__ = ["TICKETS", "Daemons", "daemon_user", "ticket_folder"]

TICKETS = "tickets"
"""The folder of tickets, beside the holder's socket; `threefs.csi.tickets` fills it."""
TICKET_FILE = "ticket"
DIGEST_CHARACTERS = 40
USERS_FIRST, USERS_BITS = 0x7000_0000, 27
"""Ids that no distribution, user namespace of the kubelet or systemd gives to anybody."""


def ticket_folder(volume: str) -> str:
    """The name of the folder with a volume's ticket; ids have slashes."""
    return hashlib.sha256(volume.encode()).hexdigest()[:DIGEST_CHARACTERS]


def daemon_user(volume: str) -> int:
    """The user and group of the daemons of a volume."""
    digest = hashlib.sha256(volume.encode()).digest()
    return USERS_FIRST + (int.from_bytes(digest[:4]) >> (32 - USERS_BITS))


class Daemons:
    """Makes the daemon of a mount; knows no mounts itself."""

    def __init__(
        self,
        command: list[str],
        clusters: Path,
        states: Path,
        groups: ControlGroups | None = None,
    ) -> None:
        self._command = command
        self._groups = groups
        self._clusters = clusters
        self._states = states

    def of(self, held: Held) -> Daemon:
        """Its daemon, not started yet."""
        cluster, root = self._reached(held)
        command = [*self._command, "--cluster", str(cluster)]
        if self._is_confined(held):
            self.open_to_daemon(held)
            command += ["--user", str(daemon_user(held.volume))]
        command += ["--root", root, "--state", str(self.state_file(held))]
        if held.node:
            # Nobody else has the files, so the kernel may write behind.
            command += ["--claim-for", held.node, "--write-back"]
        command += ["--read-only"] * held.read_only
        group = self._groups.of(ticket_folder(held.volume)) if self._groups else None
        return Daemon(command, held.descriptor, held.volume, group)

    def state_file(self, held: Held) -> Path:
        """What one daemon of a mount leaves to the next; beside the socket, as it outlives pods."""
        return self._states / f"mount-{held.device.partition(':')[2]}.state"

    def open_to_daemon(self, held: Held) -> None:
        """Let the daemon's user write its state and read its ticket, also one that was renewed."""
        if not self._is_confined(held):
            return
        user = daemon_user(held.volume)
        descriptor = os.open(self.state_file(held), os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR, 0o600)
        try:
            os.fchown(descriptor, user, user)
        finally:
            os.close(descriptor)
        # The node service writes it, and may just be removing it.
        with suppress(FileNotFoundError):
            folder = self._ticket(held).parent
            os.chown(folder, 0, user)
            folder.chmod(0o2750)
            for file in (self._ticket(held), folder / TICKET_FILE):
                os.chown(file, 0, user)
                file.chmod(0o640)

    def sweep_groups(self, held: Callable[[], Iterable[Held]]) -> None:
        """Remove the control groups of volumes that are not held."""
        if self._groups is not None:
            self._groups.sweep(lambda: {ticket_folder(one.volume) for one in held()})

    def check_cluster(self, name: str) -> None:
        """Refuse a name that could lead to another folder."""
        if not name or "/" in name or name.startswith("."):
            raise Refused("invalid", f"cluster is {name[:80]!r}; it must be a plain name")

    def _reached(self, held: Held) -> tuple[Path, str]:
        """The `cluster.json` that a daemon uses, and the mounted directory in what it reaches.

        With a ticket the volume's directory is the root of the tree. Without one here, and without
        the cluster's own file, it is waited for: the node service writes it.
        """
        if self._has_key(held):
            return self._own(held), held.root
        return self._ticket(held), f"/{held.root.rpartition('/')[2]}"

    def _has_key(self, held: Held) -> bool:
        return self._own(held).is_file() and not self._ticket(held).is_file()

    def _is_confined(self, held: Held) -> bool:
        """Not with the cluster's key, which root alone reads and with which all is lost anyway."""
        return os.geteuid() == 0 and not self._has_key(held)

    def _own(self, held: Held) -> Path:
        return self._clusters / held.cluster / "cluster.json"

    def _ticket(self, held: Held) -> Path:
        return self._states / TICKETS / ticket_folder(held.volume) / "cluster.json"

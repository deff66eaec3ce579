"""The FUSE daemons of mounts: their command lines, and the file that each leaves to the next."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from .daemon import Daemon
from .protocol import Refused

if TYPE_CHECKING:
    from pathlib import Path

    from .held import Held

__all__ = ["TICKETS", "Daemons", "ticket_folder"]

TICKETS = "tickets"
"""The folder of tickets, beside the holder's socket; `threefs.csi.tickets` fills it."""
DIGEST_CHARACTERS = 40


def ticket_folder(volume: str) -> str:
    """The name of the folder with a volume's ticket; ids have slashes."""
    return hashlib.sha256(volume.encode()).hexdigest()[:DIGEST_CHARACTERS]


class Daemons:
    """Makes the daemon of a mount; knows no mounts itself."""

    def __init__(self, command: list[str], clusters: Path, states: Path) -> None:
        self._command = command
        self._clusters = clusters
        self._states = states

    def of(self, held: Held) -> Daemon:
        """Its daemon, not started yet."""
        cluster, root = self._reached(held)
        command = [*self._command, "--cluster", str(cluster)]
        command += ["--root", root, "--state", str(self.state_file(held))]
        if held.node:
            # Nobody else has the files, so the kernel may write behind.
            command += ["--claim-for", held.node, "--write-back"]
        return Daemon([*command, *(["--read-only"] * held.read_only)], held.descriptor, held.volume)

    def state_file(self, held: Held) -> Path:
        """What one daemon of a mount leaves to the next; beside the socket, as it outlives pods."""
        return self._states / f"mount-{held.device.partition(':')[2]}.state"

    def check_cluster(self, name: str) -> None:
        """Refuse a name that could lead to another folder."""
        if not name or "/" in name or name.startswith("."):
            raise Refused("invalid", f"cluster is {name[:80]!r}; it must be a plain name")

    def _reached(self, held: Held) -> tuple[Path, str]:
        """The `cluster.json` that a daemon uses, and the mounted directory in what it reaches.

        With a ticket the volume's directory is the root of the tree. Without one here, and without
        the cluster's own file, it is waited for: the node service writes it.
        """
        own = self._clusters / held.cluster / "cluster.json"
        ticket = self._states / TICKETS / ticket_folder(held.volume) / "cluster.json"
        if own.is_file() and not ticket.is_file():
            return own, held.root
        return ticket, f"/{held.root.rpartition('/')[2]}"

"""The FUSE daemons of mounts: their command lines, and the file that each leaves to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .daemon import Daemon
from .protocol import Refused

if TYPE_CHECKING:
    from pathlib import Path

    from .held import Held

__all__ = ["Daemons"]


class Daemons:
    """Makes the daemon of a mount; knows no mounts itself."""

    def __init__(self, command: list[str], clusters: Path, states: Path) -> None:
        self._command = command
        self._clusters = clusters
        self._states = states

    def of(self, held: Held) -> Daemon:
        """Its daemon, not started yet."""
        command = [*self._command, "--cluster", str(self._cluster_file(held.cluster))]
        command += ["--root", held.root, "--state", str(self.state_file(held))]
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

    def _cluster_file(self, cluster: str) -> Path:
        return self._clusters / cluster / "cluster.json"

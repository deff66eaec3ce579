"""Clients of the configured clusters, and the protocol of the operations that the driver uses."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from threefs.client import Client
from threefs.cluster import CLUSTER_FILE, ClusterFile
from threefs.csi.errors import InvalidArgument, Unreachable
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from threefs.client import FileSystemSpace, Quota, Stat
    from threefs.copier import CopyEntry
    from threefs.snapshots import Snapshot

__all__ = ["Clusters", "Copier", "Directories", "Rooted", "VolumeSnapshots"]


class VolumeSnapshots(Protocol):
    """The snapshots of one volume, see `threefs.snapshots`."""

    def create(self, name: str) -> Snapshot:
        """Create a snapshot."""

    def remove(self, name: str) -> None:
        """Remove a snapshot."""

    def all(self) -> list[Snapshot]:
        """Return all snapshots, oldest first."""


class Copier(Protocol):
    """Copies of trees by inode, see `threefs.copier`."""

    def hold_for(self, seconds: float) -> None:
        """Extend the lease that changes of this copier require."""

    def revoke(self) -> None:
        """End the lease for good."""

    def page(self, directory: int, after: str, limit: int) -> tuple[list[CopyEntry], bool]:
        """Return entries of a directory behind a name, and whether there are more."""

    def open_directory(self, parent: int, name: str) -> int:
        """Make a directory unless it exists."""

    def copy(self, source: int, directory: int, name: str, offset: int) -> tuple[int, int | None]:
        """Copy a file from an offset on; return its inode and where to continue."""

    def link(self, file: int, directory: int, name: str) -> None:
        """Give a file another name."""

    def copy_attributes(self, source: int, destination: int) -> None:
        """Copy owner, mode, times and extended attributes."""


class Directories(Protocol):
    """The operations of `threefs.Client` on which volumes are built; each is atomic."""

    def make_directory(
        self,
        path: str,
        mode: int = 0o755,
        *,
        exist_ok: bool = False,
        chunk_bytes: int = 0,
        stripe: int = 0,
    ) -> Stat:
        """Make one directory, with the layout of new files in it; 0: as in its parent."""

    def remove_tree(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a directory with everything below it."""

    def rmdir(self, path: str) -> None:
        """Remove a directory that is empty."""

    def rename(self, source: str, destination: str) -> None:
        """Give a path another name."""

    def remove(self, path: str) -> None:
        """Remove a file or a symbolic link."""

    def symlink(self, target: str, path: str) -> None:
        """Make `path` a symbolic link to `target`; it must not exist."""

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""

    def snapshots(self, volume: str) -> VolumeSnapshots:
        """Return the snapshots of a directory with a quota."""

    def copier(self) -> Copier:
        """Return operations to copy trees, under a separate lease."""

    def stat(self, path: str) -> Stat:
        """Return kind, inode, size and mode of a path."""

    def listdir(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""

    def chmod(self, path: str, mode: int) -> None:
        """Set permission bits."""

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set owner and group."""

    def set_quota(
        self, path: str, bytes_max: int | None = None, inodes_max: int | None = None
    ) -> Quota:
        """Set the limits of a directory."""

    def keep_removed(self, path: str, seconds: int) -> None:
        """Set how long removed files of a directory with a quota are kept."""

    def quota(self, path: str) -> Quota | None:
        """Return limits and usage of a directory."""

    def statfs(self, path: str = "/") -> FileSystemSpace:
        """Return total and free space."""

    def setxattr(self, path: str, attribute: str, value: bytes) -> None:
        """Set an extended attribute."""

    def getxattr(self, path: str, attribute: str) -> bytes:
        """Read an extended attribute."""

    def removexattr(self, path: str, attribute: str) -> None:
        """Remove an extended attribute."""

    def claim(
        self, path: str, holder: str, stood_still: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """Acquire or renew the claim on a directory; return the resulting claim."""

    def claim_of(self, path: str) -> tuple[str, int] | None:
        """Return the claim on a directory."""

    def unclaim(self, path: str, holder: str) -> None:
        """Release a claim."""

    def status(self) -> str:
        """Return the cluster's state as JSON."""


class Clusters:
    """Clients of the clusters in a folder: one folder each, with a `cluster.json` in it."""

    def __init__(
        self,
        folder: Path,
        timeout_seconds: float,
        connect: Callable[[ClusterFile, float], Directories] | None = None,
    ) -> None:
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._connect = connect or _connect
        self._open: dict[str, tuple[ClusterFile, Directories]] = {}
        self._lock = threading.Lock()

    def within(self, timeout_seconds: float) -> Clusters:
        """Return the same clusters with another timeout."""
        return Clusters(self._folder, timeout_seconds, self._connect)

    def names(self) -> list[str]:
        """Return the names of the configured clusters, sorted."""
        try:
            entries = sorted(self._folder.iterdir())
        except OSError:
            return []
        return [entry.name for entry in entries if (entry / CLUSTER_FILE).is_file()]

    def of(self, name: str) -> Directories:
        """Return the client of a cluster; a changed `cluster.json` is reloaded."""
        file = self.file(name)
        with self._lock:
            open_file, client = self._open.get(name, (None, None))
            if client is None or open_file != file:
                try:
                    client = self._connect(file, self._timeout_seconds)
                except ThreeFSError as error:
                    raise Unreachable(f"cluster `{name}`: {error}") from error
                self._open[name] = (file, client)
            return client

    def file(self, name: str) -> ClusterFile:
        """The `cluster.json` of a cluster."""
        if name not in self.names():
            names = ", ".join(self.names()) or "none"
            raise InvalidArgument(
                f"unknown cluster `{name}` (configured: {names}); add a folder `{name}` with its "
                f"cluster.json to `{self._folder}`"
            )
        try:
            return ClusterFile.read(self._folder / name)
        except ThreeFSError as error:
            raise Unreachable(f"cluster `{name}`: {error}") from error

    def drop(self, name: str) -> None:
        """Drop the client of a cluster; it is closed when its last call has returned."""
        with self._lock:
            self._open.pop(name, None)


class Rooted:
    """View of a volume through its ticket, for which the volume's directory is the root.

    Accepts paths of the whole tree, so that callers need not distinguish tickets and keys.
    """

    def __init__(self, files: Directories, directory: str) -> None:
        self._files = files
        self._directory = directory

    def quota(self, path: str) -> Quota | None:
        """See `Directories`."""
        return self._files.quota(self._within(path))

    def claim(
        self, path: str, holder: str, stood_still: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """See `Directories`."""
        return self._files.claim(self._within(path), holder, stood_still)

    def claim_of(self, path: str) -> tuple[str, int] | None:
        """See `Directories`."""
        return self._files.claim_of(self._within(path))

    def unclaim(self, path: str, holder: str) -> None:
        """See `Directories`."""
        self._files.unclaim(self._within(path), holder)

    def _within(self, path: str) -> str:
        if path != self._directory and not path.startswith(f"{self._directory}/"):
            raise InvalidArgument(f"`{path}` is not within `{self._directory}`")
        return path.removeprefix(self._directory) or "/"


def _connect(file: ClusterFile, timeout_seconds: float) -> Directories:
    return Client(file, timeout_seconds=timeout_seconds, control_plane=True)

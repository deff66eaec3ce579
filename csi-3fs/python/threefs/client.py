"""Blocking client: files, folders and batches on one cluster.

Guarantees: when a write returns, its bytes are durable on all serving replicas; a read returns the
newest acknowledged write; every call ends within the client's timeout, and waits until then for a
service that restarts.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from threefs import _native
from threefs.cluster import ClusterFile, one_or_list
from threefs.copier import TreeCopier
from threefs.errors import Exists, InvalidArgument, IsADirectory, NotFound, ThreeFSError
from threefs.file import RawFile, open_file
from threefs.location import own_location
from threefs.snapshots import Snapshots
from threefs.trash import Trash

if TYPE_CHECKING:
    import io
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from threefs._native import ChunkAudit, RawQuota, RawStat
    from threefs.file import Buffer

__all__ = ["TIMEOUT_SECONDS", "Client", "Entry", "FileSystemSpace", "Quota", "Stat", "connect"]

TIMEOUT_SECONDS = 30.0
"""Timeout of a call while services do not reply; covers any restart of one of them."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Attributes of one path."""

    kind: Literal["file", "directory", "symlink", "special"]
    inode: int
    size: int
    mode: int
    modified_ns: int
    chunk_bytes: int
    """Bytes of a chunk of a file, or of new files in a directory; 0: the default of the service."""
    stripe: int
    """Number of chains over which a file, or a new file in a directory, is spread; 0: the default
    of the service."""

    @property
    def is_dir(self) -> bool:
        """True for a directory."""
        return self.kind == "directory"

    @property
    def is_file(self) -> bool:
        """True for a file."""
        return self.kind == "file"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory, with its attributes."""

    name: str
    stat: Stat


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits and usage of a directory tree; a limit of None means unlimited.

    A file counts with its length (holes too) or with what its writers have reserved, if that is
    more; every file, directory and symbolic link counts as one inode, the directory itself not.
    """

    bytes_max: int | None
    bytes_used: int
    inodes_max: int | None
    inodes_used: int


@dataclass(frozen=True, slots=True)
class FileSystemSpace:
    """Capacity of a path, as `df` shows it: of the tightest quota above it, else of the cluster."""

    bytes_total: int
    bytes_free: int
    inodes_total: int
    inodes_free: int


def connect(
    cluster: str | os.PathLike[str] | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    location: str | None = None,
) -> Client:
    """Connect to the cluster of a `cluster.json`, by default the one that THREEFS_CLUSTER names.

    `location` is the ZONE/RACK/HOST of this machine, whose near replicas are read; default: as for
    storage services, from THREEFS_ZONE, THREEFS_RACK, THREEFS_HOST and THREEFS_LOCATION_FILE.
    Nothing is sent before the first call, so the cluster may still be starting.
    """
    path = cluster if cluster is not None else os.environ.get("THREEFS_CLUSTER")
    if not path:
        raise InvalidArgument(
            "no cluster given: pass the path of its cluster.json or set THREEFS_CLUSTER"
        )
    return Client(ClusterFile.read(Path(path)), timeout_seconds=timeout_seconds, location=location)


class Client:
    """A thread-safe client; paths are absolute strings such as ``/data/corpus.bin``."""

    def __init__(
        self,
        cluster: ClusterFile,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        control_plane: bool = False,
        location: str | None = None,
    ) -> None:
        """Connect to a cluster; `location` as for `connect`.

        With `control_plane` it manages volumes: it reads and sets the attributes with the prefix
        ``user.threefs.``, which other clients do not see, and refuses paths that contain symbolic
        links or ``..``, because tenants can create those.
        """
        if timeout_seconds <= 0:
            raise InvalidArgument(f"timeout_seconds is {timeout_seconds}; it must be above 0")
        self.cluster = cluster
        self._native = _native.Client(
            cluster.mgmtd,
            one_or_list(cluster.meta),
            cluster.key_file,
            timeout_seconds,
            control_plane,
            cluster.tls,
            own_location(os.environ) if location is None else location,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Idempotent; any later call is an error."""
        self._native.close()

    # Folders and names

    def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool | None = None) -> None:
        """Make a directory; with `parents` also those above it, and then it may exist already."""
        allowed = parents if exist_ok is None else exist_ok
        try:
            self._native.mkdir(path, parents)
        except Exists:
            if not (allowed and self.stat(path).is_dir):
                raise

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, sorted."""
        return self._native.listdir(path)

    def scandir(self, path: str) -> list[Entry]:
        """The entries of a directory, sorted by name."""
        return [Entry(name, _stat(raw)) for name, raw in self._native.scandir(path)]

    def stat(self, path: str, *, follow_symlinks: bool = True) -> Stat:
        """Return the attributes of a path."""
        return _stat(self._native.stat(path, follow_symlinks))

    def exists(self, path: str) -> bool:
        """True if the path exists."""
        try:
            self.stat(path)
        except (NotFound, NotADirectoryError):
            return False
        return True

    def rename(self, source: str, destination: str) -> None:
        """Rename atomically for every reader; replaces a file at the destination."""
        self._native.rename(source, destination)

    def remove(self, path: str) -> None:
        """Remove a file or a symbolic link."""
        self._native.remove(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self._native.rmdir(path)

    def rmtree(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a directory and everything below it."""
        try:
            self._native.rmtree(path)
        except NotFound:
            if not missing_ok:
                raise

    def link(self, source: str, destination: str) -> None:
        """Give a file another name; an existing `destination` is never replaced."""
        self._native.link(source, destination)

    def symlink(self, target: str, path: str) -> None:
        """Make `path` a symbolic link to `target`."""
        self._native.symlink(target, path)

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""
        return self._native.readlink(path)

    # Volumes: directories with limits, attributes, removal of everything

    def make_directory(
        self,
        path: str,
        mode: int = 0o755,
        *,
        exist_ok: bool = False,
        chunk_bytes: int = 0,
        stripe: int = 0,
    ) -> Stat:
        """Make one directory with exactly these permission bits; its parent must exist.

        `chunk_bytes` and `stripe` are the layout of new files and directories in it; 0: as in its
        parent. An existing directory keeps its layout.
        """
        try:
            return _stat(self._native.make_directory(path, mode, chunk_bytes, stripe))
        except Exists:
            if not (exist_ok and (status := self.stat(path)).is_dir):
                raise
            return status

    def remove_tree(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a path with everything below it, as one change.

        The name is gone when this returns. The contents are freed in the background, in bounded
        steps, across restarts of the service. Quotas above are credited immediately for a
        directory with a separate quota, otherwise as the removal proceeds.
        """
        self.rmtree(path, missing_ok=missing_ok)

    def set_quota(
        self, path: str, bytes_max: int | None = None, inodes_max: int | None = None
    ) -> Quota:
        """Set both limits of a directory; None removes a limit.

        Limits below what is in use are allowed: nothing new fits until something is removed. A
        directory gets its first quota while it is still small (a thousand inodes below it).
        """
        return _quota(self._native.set_quota(path, bytes_max, inodes_max))

    def quota(self, path: str) -> Quota | None:
        """The directory's own limits and its exact use; None if it was never given any."""
        inode = self.stat(path).inode
        for raw in self._native.quotas(path):
            if raw[0] == inode:
                return _quota(raw)
        return None

    def snapshots(self, volume: str) -> Snapshots:
        """The snapshots of a directory with a quota."""
        return Snapshots(self._native, volume)

    def copier(self) -> TreeCopier:
        """Operations to copy trees inside the cluster."""
        return TreeCopier(self._native.copier())

    def trash(self, volume: str) -> Trash:
        """The removed files of a directory with a quota."""
        return Trash(self._native, volume)

    def keep_removed(self, volume: str, seconds: int) -> None:
        """Set how long removed files of a volume are kept; see `Trash.keep`."""
        self.trash(volume).keep(seconds)

    def trash_count(self) -> int:
        """Number of entries in the trash of all volumes, counted up to 100,000."""
        return self._native.trash_count()

    def statfs(self, path: str = "/") -> FileSystemSpace:
        """Return the free space for new files at a path."""
        return FileSystemSpace(*self._native.statfs(path))

    def setxattr(self, path: str, attribute: str, value: bytes) -> None:
        """Set an extended attribute with the prefix ``user.``; limits as on ext4.

        The prefix ``user.threefs.`` is reserved for the control plane.
        """
        self._native.setxattr(path, attribute, value)

    def getxattr(self, path: str, attribute: str) -> bytes:
        """An extended attribute's value; `NoAttribute` if it is not set."""
        return self._native.getxattr(path, attribute)

    def listxattr(self, path: str) -> list[str]:
        """Names of all extended attributes, sorted."""
        return self._native.listxattr(path)

    def removexattr(self, path: str, attribute: str) -> None:
        """Remove an extended attribute; `NoAttribute` if it is not set."""
        self._native.removexattr(path, attribute)

    def chmod(self, path: str, mode: int) -> None:
        """Set permission bits."""
        self._native.set_owner(path, mode, None, None)

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set owner and group."""
        self._native.set_owner(path, None, uid, gid)

    # Whole files

    def read_file(self, path: str) -> bytes:
        """All bytes of a file."""
        return self._native.batch_read([(path, 0, None)])[0]

    def write_file(self, path: str, data: Buffer) -> None:
        """Replace the contents of a file atomically with `data`."""
        if not self.exists(path):
            self.batch_write([(path, 0, data)])
            return
        if self.stat(path).is_dir:
            raise IsADirectory(f"`{path}` is a directory; name a file in it", path=path)
        temporary = str(PurePosixPath(path).with_name(f".{uuid.uuid4().hex}.tmp"))
        try:
            self.batch_write([(temporary, 0, data)])
            self.rename(temporary, path)
        except BaseException:
            # A full disk must not keep a partial file. A rename that failed with a timeout may have
            # succeeded: then the file to remove does not exist.
            with suppress(ThreeFSError):
                self._native.remove(temporary)
            raise

    def open(self, path: str, mode: str = "rb", *, encoding: str | None = None) -> io.IOBase | Any:
        """Open a file as Python's `open` does: r, w, x, a, with b or t and +.

        Writes of the returned object are durable once `flush` or `close` has returned.
        """
        return open_file(self._native, path, mode, encoding=encoding)

    def open_raw(self, path: str, mode: str = "rb") -> RawFile:
        """Open a file without a buffer: every write is durable when it returns."""
        return RawFile(self._native, path, mode)

    # Batches

    def batch_write(
        self, writes: Sequence[tuple[str, int, Buffer]], *, create: bool = True
    ) -> None:
        """Write many (path, offset, data) as one batch; all are durable when this returns.

        Files that do not exist are created (their folder must exist) unless `create` is false.
        Several writes to one range of one batch take effect in the order given. After an error
        any part of the batch may have been written; the same batch may be written again.
        """
        self._native.batch_write(writes, create)

    def batch_read(self, reads: Sequence[tuple[str, int, int | None]]) -> list[bytes]:
        """Read many (path, offset, length) as one batch; None as length is "to the end".

        Results are cut off at the end of the file, as with a file's `read`.
        """
        return self._native.batch_read(reads)

    def batch_read_into(self, reads: Sequence[tuple[str, int, Buffer]]) -> list[int]:
        """Read many (path, offset, writable buffer) as one batch, without any copy in Python.

        Returns the number of bytes read into each buffer: short only at the end of a file.
        """
        return self._native.batch_read_into(reads)

    def claim(
        self, path: str, holder: str, stood_still: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """Take or renew the claim on a directory that only one node may use at a time.

        Returns the current (holder, beat). Another holder's claim is taken only if it equals
        `stood_still`.
        """
        return self._native.claim(path, holder, stood_still)

    def claim_of(self, path: str) -> tuple[str, int] | None:
        """The claim on a directory: (holder, beat)."""
        return self._native.claim_of(path)

    def unclaim(self, path: str, holder: str) -> None:
        """Release a claim if `holder` holds it."""
        self._native.unclaim(path, holder)

    # The cluster

    def status(self) -> str:
        """The cluster's state as JSON: services, targets, chains, capacity."""
        return self._native.status()

    def scrub(self, *, start: bool = False, targets: Sequence[int] = ()) -> str:
        """The scrub of each target, as JSON; with `start`, a pass is started on each first.

        `targets` lists the numbers of targets; default: all.
        """
        return self._native.scrub(start, targets)

    def usage(self) -> str:
        """Calls and bytes of each service by its callers since the previous call, as JSON.

        The first call starts the measurement and reports no callers. Needs the cluster's key.
        """
        return self._native.usage()

    def audit(self) -> ChunkAudit:
        """Start an audit of all chunks against the metadata. Needs the cluster's key."""
        return self._native.audit()

    def start_repair(self) -> int:
        """Start a repair of counters of the metadata. Needs the cluster's key."""
        return self._native.start_repair()

    def repair(self, repair: int, corrections: str) -> None:
        """Apply the corrections, as JSON, of a snapshot taken after the start of the repair."""
        self._native.repair(repair, corrections)

    def rebalance(self, *, apply: bool = False) -> str:
        """Return the moves that balance the storage nodes, as JSON.

        With `apply` the moves start and continue without this client.
        """
        return self._native.rebalance(apply)

    def drain(
        self, nodes: Sequence[int] | None = None, *, apply: bool = False, cancel: bool = False
    ) -> str:
        """Return the moves that drain these nodes in addition to others, as JSON.

        With `apply` the moves start and continue without this client. With `cancel` these nodes
        (None: all) are kept instead.
        """
        return self._native.drain(apply, cancel, nodes)

    def read_bytes(self) -> dict[str, int]:
        """Return the bytes that this client has read, by the distance of the replica.

        Keys: host, rack and zone (of this machine; the innermost counts), and other.
        """
        read: dict[str, int] = json.loads(self._native.read_bytes())
        return read

    def moves(self, *, plan: bool = False) -> str | None:
        """Return the moves in progress and what stalls them, as JSON; None from an older mgmtd.

        With `plan` also the planned moves that do not start, and what they wait for.
        """
        return self._native.moves(plan)

    def move_rate(self, bytes_per_second: int | None = None) -> int | None:
        """Set the limit of the bytes per second that moves copy, if one is given; return it.

        0 means unlimited, None that mgmtd is older than the limit. Copies that restore a lost
        replica are not limited.
        """
        return self._native.move_rate(bytes_per_second)

    def promote(self, target: int, *, apply: bool = False) -> str:
        """Return the effect of promoting `target` to head of its chain, as JSON; `apply` does it.

        For a chain whose last serving replicas are all lost. Every write that the chain
        acknowledged after `target` had stopped serving is lost.
        """
        return self._native.promote(target, apply)


def _quota(raw: RawQuota) -> Quota:
    _, bytes_max, bytes_used, inodes_max, inodes_used = raw
    return Quota(bytes_max, bytes_used, inodes_max, inodes_used)


def _stat(raw: RawStat) -> Stat:
    kind, *numbers = raw
    return Stat(kind, *numbers)  # type: ignore[arg-type]

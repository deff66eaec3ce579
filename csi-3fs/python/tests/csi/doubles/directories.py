"""In-memory directories with the calls of the driver; tests can make calls fail or block."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from threefs.client import FileSystemSpace, Quota, Stat
from threefs.copier import CopyEntry
from threefs.errors import (
    DirectoryNotEmpty,
    Exists,
    InvalidArgument,
    NoAttribute,
    NotADirectory,
    NotFound,
    ThreeFSError,
    Unavailable,
)
from threefs.snapshots import Snapshot

__all__ = ["MemoryDirectories", "MemoryTicket"]

SPACE_BYTES = 1 << 40
PART_BYTES = 1 << 20
"""Copied by one call."""


@dataclass
class _Entry:
    is_directory: bool
    mode: int
    inode: int
    owner: tuple[int, int] = (0, 0)
    attributes: dict[str, bytes] = field(default_factory=dict)
    claim: tuple[str, int] | None = None
    limits: tuple[int | None, int | None] | None = None
    keep_seconds: int = 0
    size: int = 0
    chunk_bytes: int = 0
    stripe: int = 0
    target: str | None = None


class MemoryDirectories:
    """One cluster in memory; thread-safe.

    Every call raises `fail` if it is set, and blocks until `unblocked` is set.
    """

    def __init__(self) -> None:
        self.fail: ThreeFSError | None = None
        self.chains_down = 0
        self.unblocked = threading.Event()
        self.unblocked.set()
        self.calls: list[str] = []
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {"/": _Entry(is_directory=True, mode=0o755, inode=1)}
        self._inodes = 1
        self._snapshots: dict[str, dict[str, Snapshot]] = {}
        self._shown: dict[str, _Entry] = {}
        """Entries of snapshots by their paths."""

    # Calls of the driver

    def make_directory(
        self,
        path: str,
        mode: int = 0o755,
        *,
        exist_ok: bool = False,
        chunk_bytes: int = 0,
        stripe: int = 0,
    ) -> Stat:
        """See `Directories`."""
        with self._begin_call("make_directory"):
            entry = self._entries.get(path)
            if entry is not None:
                if not entry.is_directory:
                    raise NotADirectory(f"`{path}` is a file")
                if not exist_ok:
                    raise Exists(f"`{path}` exists")
                return self._stat(path)
            parent = self._directory(str(PurePosixPath(path).parent))
            made = self._add(path, is_directory=True, mode=mode)
            made.chunk_bytes = chunk_bytes or parent.chunk_bytes
            made.stripe = stripe or parent.stripe
            return self._stat(path)

    def remove_tree(self, path: str, *, missing_ok: bool = False) -> None:
        """See `Directories`."""
        with self._begin_call("remove_tree"):
            if path not in self._entries:
                if missing_ok:
                    return
                raise NotFound(f"`{path}` does not exist")
            if self._snapshots.get(path):
                raise DirectoryNotEmpty(f"`{path}` has snapshots")
            for name in [name for name in self._entries if name == path or _below(name, path)]:
                del self._entries[name]
            for volume in [name for name in self._snapshots if _below(name, path)]:
                del self._snapshots[volume]

    def rename(self, source: str, destination: str) -> None:
        """See `Directories`."""
        with self._begin_call("rename"):
            self._entry(source)
            for name in [name for name in self._entries if name == source or _below(name, source)]:
                self._entries[destination + name.removeprefix(source)] = self._entries.pop(name)
            if source in self._snapshots:
                self._snapshots[destination] = self._snapshots.pop(source)

    def remove(self, path: str) -> None:
        """See `Directories`."""
        with self._begin_call("remove"):
            self._entry(path)
            del self._entries[path]

    def symlink(self, target: str, path: str) -> None:
        """See `Directories`."""
        with self._begin_call("symlink"):
            self._directory(str(PurePosixPath(path).parent))
            if path in self._entries:
                raise Exists(f"`{path}` exists")
            self._add(path, is_directory=False, mode=0o777).target = target

    def readlink(self, path: str) -> str:
        """See `Directories`."""
        with self._begin_call("readlink"):
            target = self._entry(path).target
            if target is None:
                raise InvalidArgument(f"`{path}` is not a symbolic link")
            return target

    def snapshots(self, volume: str) -> MemorySnapshots:
        """See `Directories`."""
        return MemorySnapshots(self, volume)

    def copier(self) -> MemoryCopier:
        """See `Directories`."""
        return MemoryCopier(self)

    def removexattr(self, path: str, attribute: str) -> None:
        """See `Directories`."""
        with self._begin_call("removexattr"):
            if self._entry(path).attributes.pop(attribute, None) is None:
                raise NoAttribute(f"`{path}` has no attribute {attribute}")

    def rmdir(self, path: str) -> None:
        """See `Directories`."""
        with self._begin_call("rmdir"):
            self._directory(path)
            if any(_below(name, path) for name in self._entries):
                raise DirectoryNotEmpty(f"`{path}` is not empty")
            del self._entries[path]

    def stat(self, path: str) -> Stat:
        """See `Directories`."""
        with self._begin_call("stat"):
            return self._stat(path)

    def listdir(self, path: str) -> list[str]:
        """See `Directories`."""
        with self._begin_call("listdir"):
            self._directory(path)
            parent = PurePosixPath(path)
            names = (PurePosixPath(name) for name in self._entries if name != "/")
            return sorted(name.name for name in names if name.parent == parent)

    def chmod(self, path: str, mode: int) -> None:
        """See `Directories`."""
        with self._begin_call("chmod"):
            self._entry(path).mode = mode

    def chown(self, path: str, uid: int, gid: int) -> None:
        """See `Directories`."""
        with self._begin_call("chown"):
            self._entry(path).owner = (uid, gid)

    def set_quota(
        self, path: str, bytes_max: int | None = None, inodes_max: int | None = None
    ) -> Quota:
        """See `Directories`."""
        with self._begin_call("set_quota"):
            self._directory(path).limits = (bytes_max, inodes_max)
            return self._quota(path)

    def keep_removed(self, path: str, seconds: int) -> None:
        """See `Directories`."""
        with self._begin_call("keep_removed"):
            self._directory(path).keep_seconds = seconds

    def quota(self, path: str) -> Quota | None:
        """See `Directories`."""
        with self._begin_call("quota"):
            return self._quota(path) if self._directory(path).limits is not None else None

    def statfs(self, path: str = "/") -> FileSystemSpace:
        """See `Directories`."""
        with self._begin_call("statfs"):
            self._entry(path)
            return FileSystemSpace(SPACE_BYTES, SPACE_BYTES // 2, 1 << 30, 1 << 29)

    def setxattr(self, path: str, attribute: str, value: bytes) -> None:
        """See `Directories`."""
        if not attribute.startswith("user."):
            raise InvalidArgument(f"attribute `{attribute}` must start with user.")
        with self._begin_call("setxattr"):
            self._entry(path).attributes[attribute] = bytes(value)

    def getxattr(self, path: str, attribute: str) -> bytes:
        """See `Directories`."""
        with self._begin_call("getxattr"):
            attributes = self._entry(path).attributes
            if attribute not in attributes:
                raise NoAttribute(f"`{path}` has no attribute {attribute}")
            return attributes[attribute]

    def claim(
        self, path: str, holder: str, stood_still: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """See `Directories`."""
        with self._begin_call("claim"):
            entry = self._entry(path)
            claim = entry.claim
            if claim is None or claim[0] == holder or claim == stood_still:
                entry.claim = (holder, claim[1] + 1 if claim else 1)
            assert entry.claim is not None
            return entry.claim

    def claim_of(self, path: str) -> tuple[str, int] | None:
        """See `Directories`."""
        with self._begin_call("claim_of"):
            return self._entry(path).claim

    def unclaim(self, path: str, holder: str) -> None:
        """See `Directories`."""
        with self._begin_call("unclaim"):
            entry = self._entry(path)
            if entry.claim is not None and entry.claim[0] == holder:
                entry.claim = None

    def status(self) -> str:
        """See `Directories`."""
        with self._begin_call("status"):
            return json.dumps({"cluster": {"chains": 1, "chains_down": self.chains_down}})

    # Calls of tests

    def write(self, path: str, size: int) -> None:
        """Create a file of this size."""
        with self._lock:
            self._directory(str(PurePosixPath(path).parent))
            self._add(path, is_directory=False, mode=0o644).size = size

    def paths(self) -> list[str]:
        """All paths, sorted."""
        with self._lock:
            return sorted(self._entries)

    def keep_seconds(self, path: str) -> int:
        """How long removed files are kept."""
        with self._lock:
            return self._entry(path).keep_seconds

    def mode_and_owner(self, path: str) -> tuple[int, int, int]:
        """Permission bits, user, group."""
        with self._lock:
            entry = self._entry(path)
            return (entry.mode, *entry.owner)

    def _begin_call(self, call: str) -> threading.RLock:
        self.calls.append(call)
        self.unblocked.wait(30)
        if self.fail is not None:
            raise self.fail
        return self._lock

    def _entry(self, path: str) -> _Entry:
        for parent in PurePosixPath(path).parents:
            above = self._entries.get(str(parent))
            if above is not None and not above.is_directory:
                raise NotADirectory(f"`{parent}` is a file")
        entry = self._entries.get(path) or self._shown.get(path)
        if entry is None:
            raise NotFound(f"`{path}` does not exist", path=path)
        return entry

    def _directory(self, path: str) -> _Entry:
        entry = self._entry(path)
        if not entry.is_directory:
            raise NotADirectory(f"`{path}` is a file")
        return entry

    def _add(self, path: str, *, is_directory: bool, mode: int) -> _Entry:
        self._inodes += 1
        entry = _Entry(is_directory=is_directory, mode=mode, inode=self._inodes)
        self._entries[path] = entry
        return entry

    def _stat(self, path: str) -> Stat:
        entry = self._entry(path)
        kind = "directory" if entry.is_directory else "file"
        return Stat(
            kind,  # type: ignore[arg-type]
            entry.inode,
            entry.size,
            entry.mode,
            0,
            entry.chunk_bytes,
            entry.stripe,
        )

    def _quota(self, path: str) -> Quota:
        limits = self._entries[path].limits
        assert limits is not None
        below = [entry for name, entry in self._entries.items() if _below(name, path)]
        return Quota(limits[0], sum(entry.size for entry in below), limits[1], len(below))


def _below(name: str, path: str) -> bool:
    return name.startswith(f"{path.rstrip('/')}/")


class MemorySnapshots:
    """The snapshots of one directory."""

    def __init__(self, files: MemoryDirectories, volume: str) -> None:
        self._files = files
        self._volume = volume

    def create(self, name: str) -> Snapshot:
        """See `VolumeSnapshots`."""
        with self._files._begin_call("create_snapshot"):
            used = self._files._quota(self._volume_with_quota())
            of_volume = self._files._snapshots.setdefault(self._volume, {})
            if name in of_volume:
                raise Exists(f"`{name}` exists")
            created = Snapshot(name, time.time_ns(), used.bytes_used, used.inodes_used)
            of_volume[name] = created
            prefix = f"{self._volume}/.snapshots/{name}"
            for path, entry in self._files._entries.items():
                if _below(path, self._volume):
                    self._files._inodes += 1
                    shown = replace(entry, inode=self._files._inodes)
                    self._files._shown[prefix + path.removeprefix(self._volume)] = shown
            return created

    def remove(self, name: str) -> None:
        """See `VolumeSnapshots`."""
        with self._files._begin_call("remove_snapshot"):
            of_volume = self._files._snapshots.get(self._volume_with_quota(), {})
            if of_volume.pop(name, None) is None:
                raise NotFound(f"snapshot `{name}` does not exist")
            shown = self._files._shown
            for path in [
                path for path in shown if _below(path, f"{self._volume}/.snapshots/{name}")
            ]:
                del shown[path]

    def all(self) -> list[Snapshot]:
        """See `VolumeSnapshots`."""
        with self._files._begin_call("snapshots"):
            return list(self._files._snapshots.get(self._volume_with_quota(), {}).values())

    def _volume_with_quota(self) -> str:
        if self._files._directory(self._volume).limits is None:
            raise InvalidArgument(f"`{self._volume}` has no quota")
        return self._volume


class MemoryCopier:
    """Copies trees of `MemoryDirectories`; a lease that has ended refuses changes."""

    def __init__(self, files: MemoryDirectories) -> None:
        self._files = files
        self._held = True

    def hold_for(self, seconds: float) -> None:
        """See `Copier`."""
        del seconds

    def revoke(self) -> None:
        """See `Copier`."""
        self._held = False

    def page(self, directory: int, after: str, limit: int) -> tuple[list[CopyEntry], bool]:
        """See `Copier`."""
        with self._files._begin_call("page"):
            above = PurePosixPath(self._path(directory))
            below = [
                (PurePosixPath(path).name, entry)
                for path, entry in [*self._files._entries.items(), *self._files._shown.items()]
                if PurePosixPath(path).parent == above and path != "/"
            ]
            later = sorted((name, entry) for name, entry in below if name > after)
            entries = [_copy_entry(name, entry) for name, entry in later[:limit]]
            return entries, len(later) > limit

    def open_directory(self, parent: int, name: str) -> int:
        """See `Copier`."""
        with self._changing("open_directory"):
            path = f"{self._path(parent)}/{name}"
            return self._files.make_directory(path, 0o700, exist_ok=True).inode

    def copy(self, source: int, directory: int, name: str, offset: int) -> tuple[int, int | None]:
        """See `Copier`; one call copies at most `PART_BYTES`."""
        with self._changing("copy"):
            entry = self._files._entry(self._path(source))
            path = f"{self._path(directory)}/{name}"
            if path not in self._files._entries:
                self._files._add(path, is_directory=False, mode=0o600)
            copied = self._files._entries[path]
            copied.size = min(entry.size, max(offset, copied.size) + PART_BYTES)
            if copied.size < entry.size:
                return copied.inode, copied.size
            copied.target = entry.target
            self.copy_attributes(source, copied.inode)
            return copied.inode, None

    def link(self, file: int, directory: int, name: str) -> None:
        """See `Copier`."""
        raise NotImplementedError

    def copy_attributes(self, source: int, destination: int) -> None:
        """See `Copier`."""
        with self._changing("copy_attributes"):
            entry, copied = (
                self._files._entry(self._path(inode)) for inode in (source, destination)
            )
            copied.mode, copied.owner = entry.mode, entry.owner
            copied.attributes = {
                name: value
                for name, value in entry.attributes.items()
                if not name.startswith("user.threefs.")
            }

    def _changing(self, call: str) -> threading.RLock:
        if not self._held:
            raise Unavailable("the lease has ended")
        return self._files._begin_call(call)

    def _path(self, inode: int) -> str:
        for path, entry in [*self._files._shown.items(), *self._files._entries.items()]:
            if entry.inode == inode:
                return path
        raise NotFound(f"inode {inode} does not exist")


def _copy_entry(name: str, entry: _Entry) -> CopyEntry:
    kind = "directory" if entry.is_directory else "file" if entry.target is None else "symlink"
    return CopyEntry(name, kind, entry.inode, entry.size, entry.mode, *entry.owner, 1, 0, 0)


class MemoryTicket:
    """Calls with a ticket for one directory, which is `/` in their paths."""

    def __init__(self, files: MemoryDirectories, directory: str) -> None:
        self._files = files
        self._directory = directory

    def quota(self, path: str) -> Quota | None:
        """See `Directories`."""
        return self._files.quota(self._full_path(path))

    def claim(
        self, path: str, holder: str, stood_still: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """See `Directories`."""
        return self._files.claim(self._full_path(path), holder, stood_still)

    def claim_of(self, path: str) -> tuple[str, int] | None:
        """See `Directories`."""
        return self._files.claim_of(self._full_path(path))

    def unclaim(self, path: str, holder: str) -> None:
        """See `Directories`."""
        self._files.unclaim(self._full_path(path), holder)

    def _full_path(self, path: str) -> str:
        return (self._directory + path).rstrip("/")

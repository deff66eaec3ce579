"""Storage of checkpoints: the required operations, and an implementation over a plain directory.

`threefs.Client` has the same operations, so a manager works over either. Every implementation
guarantees: when a write, a rename or a mkdir returns, it is durable; a rename is atomic and never
replaces a folder that is not empty.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BATCH_BYTES", "REQUEST_BYTES", "Files", "LocalFiles", "LocalStat"]

REQUEST_BYTES = 4 * 1024 * 1024
"""Bytes of one read or write: a multiple of the usual chunk sizes of 3FS."""
BATCH_BYTES = 64 * 1024 * 1024
"""Bytes of the requests that are made in one batch."""


class _HasSize(Protocol):
    @property
    def size(self) -> int: ...


class Files(Protocol):
    """File system interface of the checkpoint manager. Paths are absolute within the file system.

    Raises Python's exceptions: FileNotFoundError, FileExistsError, OSError with an errno.
    """

    def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool | None = None) -> None:
        """Create a folder."""

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder."""

    def stat(self, path: str) -> _HasSize:
        """Return an object with at least the size of a file."""

    def exists(self, path: str) -> bool:
        """Whether the path exists."""

    def rename(self, source: str, destination: str) -> None:
        """Rename atomically. A destination folder that is not empty is an error."""

    def rmtree(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a folder and everything below it."""

    def read_file(self, path: str) -> bytes:
        """Return all bytes of a file."""

    def write_file(self, path: str, data: Any) -> None:
        """Replace the contents of a file."""

    def batch_write(self, writes: Sequence[tuple[str, int, Any]]) -> None:
        """Write many (path, offset, bytes); create missing files."""

    def batch_read(self, reads: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Read many (path, offset, length); a result is shorter at the end of a file."""

    def batch_read_into(self, reads: Sequence[tuple[str, int, Any]]) -> list[int]:
        """Read many (path, offset, writable buffer); return the bytes read into each."""


@dataclass(frozen=True, slots=True)
class LocalStat:
    """Attributes of a local path."""

    size: int
    is_dir: bool


class LocalFiles:
    """A plain directory: `/x` is `root/x`. Durable by fsync of files and of their folders."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()

    def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool | None = None) -> None:
        """Create a folder; with `parents` also missing parents, and then it may already exist."""
        allowed = parents if exist_ok is None else exist_ok
        folder = self._local(path)
        missing = [folder, *(above for above in folder.parents if not above.exists())]
        folder.mkdir(parents=parents, exist_ok=allowed)
        for created in missing:
            _sync(created.parent)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(entry.name for entry in self._local(path).iterdir())

    def stat(self, path: str) -> LocalStat:
        """Return size and kind."""
        local = self._local(path)
        return LocalStat(local.stat().st_size, local.is_dir())

    def exists(self, path: str) -> bool:
        """Whether the path exists."""
        return self._local(path).exists()

    def rename(self, source: str, destination: str) -> None:
        """Rename atomically; replaces a file, but not a folder that is not empty."""
        before, after = self._local(source), self._local(destination)
        before.rename(after)
        _sync(after.parent)
        if before.parent != after.parent:
            _sync(before.parent)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._local(path).unlink()

    def rmtree(self, path: str, *, missing_ok: bool = False) -> None:
        """Remove a folder and everything below it."""
        try:
            shutil.rmtree(self._local(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def read_file(self, path: str) -> bytes:
        """Return all bytes of a file."""
        return self._local(path).read_bytes()

    def write_file(self, path: str, data: Any) -> None:
        """Replace the contents of a file atomically."""
        final = self._local(path)
        partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
        # Opened first: as soon as the file has its name, another process may rename the folder.
        with _opened(final.parent) as folder:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(final)
            os.fsync(folder)

    def batch_write(self, writes: Sequence[tuple[str, int, Any]]) -> None:
        """Write many (path, offset, bytes), and sync each file once."""
        for path in dict.fromkeys(path for path, _, _ in writes):
            local = self._local(path)
            is_new = not local.exists()
            descriptor = os.open(local, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                for other, offset, data in writes:
                    if other == path:
                        _write_all(descriptor, memoryview(data).cast("B"), offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                _sync(local.parent)

    def batch_read(self, reads: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Read many (path, offset, length)."""
        results = []
        for path, offset, length in reads:
            with self._local(path).open("rb") as file:
                file.seek(offset)
                results.append(file.read(length))
        return results

    def batch_read_into(self, reads: Sequence[tuple[str, int, Any]]) -> list[int]:
        """Read many (path, offset, writable buffer); a count is short at the end of a file."""
        counts = []
        for path, offset, buffer in reads:
            with self._local(path).open("rb") as file:  # its `readinto` fills the whole buffer
                file.seek(offset)
                counts.append(file.readinto(buffer))
        return counts

    def _local(self, path: str) -> Path:
        inside = os.path.normpath("/" + path.lstrip("/"))  # ".." ends at the root
        return self._root / inside.lstrip("/")


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _sync(folder: Path) -> None:
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

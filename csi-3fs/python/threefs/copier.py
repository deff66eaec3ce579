"""Copies of trees inside a cluster, by inode: any depth, no memory for paths, no symbolic links.

The calls can be repeated: each completes what an earlier one has left. `threefs.csi.copies` walks
the trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threefs import _native

__all__ = ["CopyEntry", "TreeCopier"]


@dataclass(frozen=True, slots=True)
class CopyEntry:
    """An entry of a directory with its inode."""

    name: str
    kind: str
    """file, directory, symlink or special."""
    inode: int
    size: int
    mode: int
    uid: int
    gid: int
    links: int
    accessed_ns: int
    modified_ns: int

    def is_copy_of(self, source: CopyEntry) -> bool:
        """Whether a copy is complete: the time of modification is set last."""
        return (self.kind, self.size, self.mode, self.uid, self.gid, self.modified_ns) == (
            source.kind,
            source.size,
            source.mode,
            source.uid,
            source.gid,
            source.modified_ns,
        )


class TreeCopier:
    """Copies files, directories and attributes under a separate lease; thread-safe.

    The identity is that of the client. Without `hold_for` the lease is unlimited.
    """

    def __init__(self, native: _native.Copier) -> None:
        self._native = native

    def hold_for(self, seconds: float) -> None:
        """Extend the lease: no change that is sent before it ends starts after it."""
        self._native.hold_for(max(0.0, seconds))

    def revoke(self) -> None:
        """End the lease for good; later changes fail."""
        self._native.hold_for(-1.0)

    def page(self, directory: int, after: str, limit: int) -> tuple[list[CopyEntry], bool]:
        """Return entries of a directory behind a name, and whether there are more.

        Names are in byte order; at most `limit` entries are returned.
        """
        entries, more = self._native.page(directory, after, limit)
        return [CopyEntry(*entry) for entry in entries], more

    def open_directory(self, parent: int, name: str) -> int:
        """Return the inode of a directory, which is made if it does not exist."""
        return self._native.open_directory(parent, name)

    def copy(self, source: int, directory: int, name: str, offset: int) -> tuple[int, int | None]:
        """Copy a file, symbolic link or special file with data, holes and attributes.

        Of a longer file one call copies a part. Returns the inode of the copy, and the offset for
        the next call, or None if the copy is complete.
        """
        return self._native.copy(source, directory, name, offset)

    def link(self, file: int, directory: int, name: str) -> None:
        """Give a file another name, which may be there already."""
        self._native.link(file, directory, name)

    def copy_attributes(self, source: int, destination: int) -> None:
        """Copy owner, mode, times and extended attributes of any inode."""
        self._native.copy_attributes(source, destination)

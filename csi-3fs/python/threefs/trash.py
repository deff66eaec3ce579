"""The trash of a volume: removed files and directories that can be restored for a time.

A volume is a directory with a quota. What is removed from it keeps its bytes and its charge, and
expires after the volume's retention.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from threefs import _native
    from threefs._native import RawTrashEntry, RawTrashId

__all__ = ["Trash", "TrashEntry"]

IDS_PER_PURGE = 128


@dataclass(frozen=True, slots=True)
class TrashEntry:
    """A removed file, symbolic link, special file, or directory with its contents."""

    id: str
    """Names it in its trash; older entries sort first."""
    path: str | None
    """Its path below the volume; None if a directory on it is gone."""
    name: str
    kind: Literal["file", "directory", "symlink", "special"]
    is_empty_directory: bool
    size: int
    removed_ms: int
    """Time of the removal in milliseconds since 1970."""
    removed_by: int
    """User id. 0 where the kernel does not name it: mounts of ReadWriteOnce volumes
    (Linux 6.12)."""


class Trash:
    """The trash of one volume. Only holders of the key, or of the volume's credential, use it."""

    def __init__(self, native: _native.Client, volume: str) -> None:
        self._native = native
        self.volume = volume

    def keep(self, seconds: int) -> None:
        """Set how long removed files are kept; 0: not, and those that are kept are removed."""
        self._native.keep_removed(self.volume, seconds)

    def keep_seconds(self) -> int:
        """How long removed files are kept; 0: not."""
        return self._native.trash(self.volume)[0]

    def entries(self) -> Iterator[TrashEntry]:
        """Return all entries, oldest first, read page by page."""
        after: RawTrashId | None = None
        more = True
        while more:
            _, page, more = self._native.trash(self.volume, after)
            for raw in page:
                yield _entry(raw)
                after = raw[0]

    def restore(self, entry: str, to: str | None = None) -> None:
        """Give an entry its former path, or another one in the volume, that does not exist.

        Directories above it that were removed are restored, too.
        """
        self._native.restore_removed(self.volume, _raw_id(entry), to)

    def purge(self, entries: Iterable[str]) -> int:
        """Remove entries for good, batch by batch; their space is freed in the background.

        Returns their number.
        """
        ids = map(_raw_id, entries)
        count = 0
        while batch := list(islice(ids, IDS_PER_PURGE)):
            self._native.purge_removed(self.volume, batch)
            count += len(batch)
        return count


def _raw_id(text: str) -> RawTrashId:
    match = re.fullmatch(r"(\d{1,19})-(\d{1,19})", text, re.ASCII)
    if match is None:
        raise InvalidArgument(
            f"`{text[:80]}` is not the id of an entry in a trash; `threefs trash list` shows them"
        )
    return int(match[1]), int(match[2])


def _entry(raw: RawTrashEntry) -> TrashEntry:
    (removed_ms, inode), path, name, kind, is_empty_directory, size, removed_by = raw
    return TrashEntry(
        id=f"{removed_ms}-{inode}",
        path=path,
        name=name,
        kind=kind,
        is_empty_directory=is_empty_directory,
        size=size,
        removed_ms=removed_ms,
        removed_by=removed_by,
    )

"""Units of work that copy a tree, and that compare the copy with it afterwards.

A unit may be repeated, so a copy is resumed by starting again: what is complete is recognized by
its attributes in the listing of its directory and skipped. The walk keeps one position for each
directory that it is in, whatever the size of the tree.

A file with several names is copied once, to a directory next to the copy, with its inode as its
name; then each of its names is a link. So a restarted copy knows it, too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from threefs.csi.errors import CsiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from threefs.copier import CopyEntry
    from threefs.csi.volumes.clusters import Copier

__all__ = ["BARRIER", "CopyDiffers", "Progress", "TreeCopy", "Unit"]

PAGE_ENTRIES = 256
POSITIONS_MAX = 50_000
"""Beyond this number of positions a page has one entry, so that a deep tree of wide directories
needs little more."""
LINKED_MAX = 10_000
"""Files with several names that are remembered as complete; others are looked at again."""

Unit: TypeAlias = "Callable[[], Unit | None]"
"""Does a limited amount of work, and returns what follows it."""
BARRIER = None
"""All units before it end before any after it starts."""


class CopyDiffers(CsiError):  # noqa: N818 -- a reply, as the others
    """The copy is not equal to its source."""


class Progress:
    """What a copy has done; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.files = 0
        self.bytes = 0

    def add(self, files: int, size: int) -> None:
        """Count copied files and bytes."""
        with self._lock:
            self.files += files
            self.bytes += size

    def __str__(self) -> str:
        return f"{self.files} files with {self.bytes} bytes"


class TreeCopy:
    """The copy of one directory, of which nothing changes, to another."""

    def __init__(
        self, copier: Copier, source: int, destination: int, links: int, progress: Progress
    ) -> None:
        self._copier = copier
        self._source = source
        self._destination = destination
        self._links = links
        self._progress = progress
        self._lock = threading.Lock()
        self._waiting: dict[int, list[tuple[int, str]]] = {}
        self._linked: OrderedDict[int, int] = OrderedDict()

    def copy(self) -> Iterator[Unit]:
        """Return units that copy what is missing, in any order."""
        for destination, entries, existing in self._walk():
            for entry in entries:
                copied = existing.get(entry.name)
                if entry.kind == "directory" or (copied and copied.is_copy_of(entry)):
                    continue
                if entry.links > 1:
                    yield partial(self._copy_linked, entry, destination)
                else:
                    yield partial(self._copy_part, entry, destination, 0)

    def finish(self) -> Iterator[Unit]:
        """Compare all names; return units that set the attributes of directories.

        Directories get their times when nothing is made in them any more.
        """
        yield partial(self._set_attributes, self._source, self._destination)
        for destination, entries, existing in self._walk(make=False):
            names = {entry.name: entry for entry in entries}
            if names.keys() != existing.keys():
                name = min(names.keys() ^ existing.keys())
                raise CopyDiffers(f"`{name[:80]}` in inode {destination} is in one tree only")
            for entry in entries:
                copied = existing[entry.name]
                if entry.kind == "directory" and copied.kind == "directory":
                    yield partial(self._set_attributes, entry.inode, copied.inode)
                elif not copied.is_copy_of(entry):
                    raise CopyDiffers(f"`{entry.name[:80]}` in inode {destination} is not complete")

    def _walk(
        self, *, make: bool = True
    ) -> Iterator[tuple[int, list[CopyEntry], dict[str, CopyEntry]]]:
        """Visit pages of both trees: directory of the copy, entries of both."""
        positions = [(self._source, self._destination, "")]
        while positions:
            source, destination, after = positions.pop()
            limit = PAGE_ENTRIES if len(positions) < POSITIONS_MAX else 1
            entries, more = self._copier.page(source, after, limit)
            # The copy has only names of the source, so a page of it reaches as far.
            existing = {
                entry.name: entry for entry in self._copier.page(destination, after, limit)[0]
            }
            if more:
                positions.append((source, destination, entries[-1].name))
                end = entries[-1].name.encode()
                existing = {name: it for name, it in existing.items() if name.encode() <= end}
            yield destination, entries, existing
            for entry in entries:
                if entry.kind == "directory":
                    copied = existing.get(entry.name)
                    if copied is not None:
                        child = copied.inode
                    elif make:
                        child = self._copier.open_directory(destination, entry.name)
                    else:
                        continue
                    positions.append((entry.inode, child, ""))

    def _copy_part(self, entry: CopyEntry, directory: int, offset: int) -> Unit | None:
        _, following = self._copier.copy(entry.inode, directory, entry.name, offset)
        if following is not None:
            self._progress.add(0, following - offset)
            return partial(self._copy_part, entry, directory, following)
        self._progress.add(1, max(0, entry.size - offset))
        return None

    def _copy_linked(self, entry: CopyEntry, directory: int) -> Unit | None:
        with self._lock:
            linked = self._linked.get(entry.inode)
            if linked is None:
                waiting = self._waiting.setdefault(entry.inode, [])
                waiting.append((directory, entry.name))
                if len(waiting) > 1:
                    # Another unit copies the file, and then makes this name.
                    return None
        if linked is None:
            return partial(self._copy_linked_part, entry, 0)
        self._copier.link(linked, directory, entry.name)
        return None

    def _copy_linked_part(self, entry: CopyEntry, offset: int) -> Unit | None:
        name = str(entry.inode)
        copied, following = self._copier.copy(entry.inode, self._links, name, offset)
        if following is not None:
            self._progress.add(0, following - offset)
            return partial(self._copy_linked_part, entry, following)
        self._progress.add(1, max(0, entry.size - offset))
        with self._lock:
            waiting = self._waiting.pop(entry.inode)
            self._linked[entry.inode] = copied
            if len(self._linked) > LINKED_MAX:
                self._linked.popitem(last=False)
        return partial(self._link_one, copied, waiting)

    def _link_one(self, file: int, waiting: list[tuple[int, str]]) -> Unit | None:
        directory, name = waiting.pop()
        self._copier.link(file, directory, name)
        return partial(self._link_one, file, waiting) if waiting else None

    def _set_attributes(self, source: int, destination: int) -> Unit | None:
        self._copier.copy_attributes(source, destination)
        return None

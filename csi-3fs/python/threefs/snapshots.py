"""Snapshots of a volume: its files and directories as they were at one moment, read-only.

A volume is a directory with a quota. `VOLUME/.snapshots/NAME` has the files of a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threefs import _native
    from threefs._native import RawSnapshot

__all__ = ["Snapshot", "Snapshots"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of a volume."""

    name: str
    created_ns: int
    """Time of its creation in nanoseconds since 1970."""
    size: int
    """Bytes that counted for the volume's quota at that time."""
    inodes: int
    """Inodes that counted for it."""


class Snapshots:
    """The snapshots of one volume. Only holders of the key, or of its credential, use them."""

    def __init__(self, native: _native.Client, volume: str) -> None:
        self._native = native
        self.volume = volume

    def create(self, name: str) -> Snapshot:
        """Create a snapshot, whatever the number of files and bytes of the volume.

        It has every change and write that was acknowledged before, none that starts later.
        """
        return _snapshot(self._native.create_snapshot(self.volume, name))

    def remove(self, name: str) -> None:
        """Remove a snapshot; its space is freed in the background."""
        self._native.remove_snapshot(self.volume, name)

    def all(self) -> list[Snapshot]:
        """Return all snapshots, oldest first."""
        return [_snapshot(raw) for raw in self._native.snapshots(self.volume)]


def _snapshot(raw: RawSnapshot) -> Snapshot:
    name, created_ns, size, inodes = raw
    return Snapshot(name=name, created_ns=created_ns, size=size, inodes=inodes)

"""Snapshots of volumes, and the records that name them.

::

    /.csi/snapshots/snapshot-1                 a symbolic link: its target is the record (JSON)
    /volumes/pvc-1/.snapshots/csi-snapshot-1   the snapshot

A record is written first, and never changed: a symbolic link is made with its target in one change,
so one name cannot get two sources, and a retry continues with the source of the first attempt. A
record whose snapshot does not exist is an unfinished creation, or what an administrator has left by
removing the snapshot.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threefs.csi.errors import AlreadyExists, InvalidArgument, Missing
from threefs.csi.logs import logger
from threefs.csi.volumes.snapshot_id import SnapshotId
from threefs.csi.volumes.volume_id import VolumeId
from threefs.errors import Exists, NotADirectory, NotFound, ThreeFSError, Unavailable
from threefs.errors import InvalidArgument as InvalidArgument3FS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threefs.csi.volumes.clusters import Directories
    from threefs.csi.volumes.volumes import Volume
    from threefs.snapshots import Snapshot as StoredSnapshot

__all__ = ["Snapshot", "SnapshotRecord", "Snapshots", "stored_snapshots"]

RECORDS = "/.csi/snapshots"
PREFIX = "csi-"
"""Of the names of these snapshots in their volumes; others belong to administrators, or to copies
(`threefs.csi.copies`)."""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """What is known before a snapshot exists."""

    name: str
    volume: VolumeId
    capacity_bytes: int
    """Size of the volume at that time."""

    def encode(self) -> str:
        """Return the target of the symbolic link."""
        return json.dumps(
            {
                "version": 1,
                "name": self.name,
                "volume": str(self.volume),
                "capacity_bytes": self.capacity_bytes,
            }
        )

    @classmethod
    def decode(cls, text: str) -> SnapshotRecord:
        """Parse a record; `ValueError` if it is damaged."""
        try:
            data = json.loads(text)
            volume = VolumeId.parse(str(data["volume"]))
            return cls(str(data["name"]), volume, int(data["capacity_bytes"]))
        except (KeyError, TypeError, InvalidArgument) as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An existing snapshot."""

    id: SnapshotId
    volume: VolumeId
    created_ns: int
    size_bytes: int
    """Minimum size of a volume with its contents."""
    inodes: int
    stored_name: str

    @property
    def path(self) -> str:
        """Its directory in 3FS."""
        return f"{self.volume.path}/.snapshots/{self.stored_name}"


class Snapshots:
    """The snapshots of one cluster."""

    def __init__(self, cluster: str, files: Directories) -> None:
        self.cluster = cluster
        self.files = files

    def create(self, snapshot: SnapshotId, name: str, volume: Volume) -> Snapshot:
        """Create a snapshot, or complete an unfinished creation."""
        record = self._record(snapshot) or self._write_record(
            snapshot, SnapshotRecord(name, volume.id, volume.capacity_bytes)
        )
        if record.volume != volume.id or record.name != name:
            raise AlreadyExists(
                f"snapshot `{name}` exists, of volume `{record.volume}`; use another name"
            )
        try:
            with suppress(Exists):
                self.files.snapshots(volume.id.path).create(PREFIX + snapshot.name)
        except Unavailable:
            # It may still be created, so the record stays.
            raise
        except ThreeFSError:
            with suppress(NotFound):
                self.files.remove(_record_path(snapshot))
            raise
        created = self._existing(snapshot, record)
        if created is None:
            raise Missing(f"snapshot `{name}` was removed while it was created; create it again")
        return created

    def find(self, snapshot: SnapshotId) -> Snapshot | None:
        """Return a snapshot, or None if it does not exist."""
        record = self._record(snapshot)
        return self._existing(snapshot, record) if record is not None else None

    def get(self, snapshot: SnapshotId) -> Snapshot:
        """Return a snapshot, which must exist."""
        existing = self.find(snapshot)
        if existing is None:
            raise Missing(f"snapshot `{snapshot}` does not exist: it was deleted, or never made")
        return existing

    def remove(self, snapshot: SnapshotId) -> VolumeId | None:
        """Remove a snapshot, then its record; return the volume that it was of."""
        record = self._record(snapshot)
        if record is None:
            return None
        with suppress(NotFound, NotADirectory):
            self.files.snapshots(record.volume.path).remove(PREFIX + snapshot.name)
        return record.volume

    def forget(self, snapshot: SnapshotId) -> None:
        """Remove the record of a removed snapshot."""
        with suppress(NotFound):
            self.files.remove(_record_path(snapshot))

    def ids(self) -> list[SnapshotId]:
        """Return the ids of all records, sorted."""
        names: list[str] = []
        with suppress(NotFound):
            names = self.files.listdir(RECORDS)
        return [self._id(name) for name in sorted(names) if self._is_id(name)]

    def of_volume(self, volume: VolumeId) -> list[Snapshot]:
        """Return the snapshots of one volume, sorted by their ids."""
        found = []
        stored = stored_snapshots(self.files, volume)
        for each in stored:
            name = each.name.removeprefix(PREFIX)
            if each.name.startswith(PREFIX) and self._is_id(name):
                record = self._record(self._id(name))
                if record is not None and record.volume == volume:
                    found.append(_described(self._id(name), record, each))
        return sorted(found, key=lambda snapshot: str(snapshot.id))

    def _existing(self, snapshot: SnapshotId, record: SnapshotRecord) -> Snapshot | None:
        for stored in stored_snapshots(self.files, record.volume):
            if stored.name == PREFIX + snapshot.name:
                return _described(snapshot, record, stored)
        return None

    def _record(self, snapshot: SnapshotId) -> SnapshotRecord | None:
        try:
            record = SnapshotRecord.decode(self.files.readlink(_record_path(snapshot)))
        except (NotFound, NotADirectory):
            return None
        except (ValueError, InvalidArgument3FS) as error:
            logger().error(
                "unreadable snapshot record", snapshot_id=str(snapshot), error=str(error)
            )
            return None
        return record if record.volume.cluster == self.cluster else None

    def _write_record(self, snapshot: SnapshotId, record: SnapshotRecord) -> SnapshotRecord:
        self.files.make_directory("/.csi", 0o755, exist_ok=True)
        self.files.make_directory(RECORDS, 0o700, exist_ok=True)
        try:
            self.files.symlink(record.encode(), _record_path(snapshot))
        except Exists:
            existing = self._record(snapshot)
            if existing is None:
                raise AlreadyExists(
                    f"`{_record_path(snapshot)}` in 3FS is not a record of this driver; move it "
                    "away"
                ) from None
            return existing
        return record

    def _id(self, name: str) -> SnapshotId:
        return SnapshotId(self.cluster, name)

    def _is_id(self, name: str) -> bool:
        try:
            return SnapshotId.parse(str(self._id(name))) == self._id(name)
        except InvalidArgument:
            return False


def stored_snapshots(files: Directories, volume: VolumeId) -> Sequence[StoredSnapshot]:
    """Return all snapshots of a volume's directory, of any origin; none if it is gone."""
    # Without a quota it is not a volume any more.
    with suppress(NotFound, NotADirectory, InvalidArgument3FS):
        return files.snapshots(volume.path).all()
    return ()


def _record_path(snapshot: SnapshotId) -> str:
    return f"{RECORDS}/{snapshot.name}"


def _described(id_: SnapshotId, record: SnapshotRecord, stored: StoredSnapshot) -> Snapshot:
    # Rows that only older snapshots show count beyond the limit: a volume of the same size fits.
    size_bytes = min(stored.size, record.capacity_bytes)
    return Snapshot(id_, record.volume, stored.created_ns, size_bytes, stored.inodes, stored.name)

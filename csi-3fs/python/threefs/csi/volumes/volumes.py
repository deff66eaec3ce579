"""Volumes as directories with a record, a hard quota, and `data`, which is mounted in pods.

::

    /volumes/pvc-1        quota; attribute user.threefs.volume: the record (JSON)
    /volumes/pvc-1/data   the mounted directory, with the owner, mode and layout of the class

The record is outside the mounted directory, so that pods cannot write it. It is written last: a
directory without one is an unfinished creation, which the next attempt completes. 3FS itself stores
where volumes are: `/.csi/parents` has one directory for each parent.

A volume that is removed while it has snapshots loses its record and its data, and gets the
attribute `user.threefs.deleted`: it does not exist any more. Its directory is removed with its last
snapshot.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, unquote

from threefs.csi.errors import AlreadyExists, InvalidArgument, Missing, Unreadable
from threefs.csi.logs import logger
from threefs.csi.volumes.parameters import inodes_max
from threefs.csi.volumes.volume_id import VolumeId, check_claims_parent
from threefs.errors import NoAttribute, NotADirectory, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threefs.client import Quota, Stat
    from threefs.csi.metrics import Metrics
    from threefs.csi.volumes.clusters import Directories
    from threefs.csi.volumes.parameters import Parameters

__all__ = ["COPY", "DATA", "DELETED", "RECORD", "ContentSource", "Volume", "Volumes"]

RECORD = "user.threefs.volume"
DELETED = "user.threefs.deleted"
COPY = "user.threefs.copy"
"""State of a volume whose contents are being copied, see `threefs.csi.copies`."""
DATA = "data"
PARENTS = "/.csi/parents"
RECORD_BYTES_MAX = 16 << 10


@dataclass(frozen=True, slots=True)
class ContentSource:
    """Where the contents of a new volume come from."""

    kind: Literal["snapshot", "volume"]
    id: str

    def as_record(self) -> dict[str, str]:
        """Return the part that is stored in the volume's record."""
        return {self.kind: self.id}

    @classmethod
    def of_record(cls, record: object) -> ContentSource | None:
        """Read the part of a record; None if the volume was created empty."""
        if isinstance(record, dict):
            if "snapshot" in record:
                return cls("snapshot", str(record["snapshot"]))
            if "volume" in record:
                return cls("volume", str(record["volume"]))
        return None


@dataclass(frozen=True, slots=True)
class Volume:
    """An existing volume."""

    id: VolumeId
    name: str
    capacity_bytes: int
    parameters: dict[str, Any]
    source: ContentSource | None = None
    """The snapshot or volume whose contents it was created with."""

    def record(self) -> bytes:
        """Return the stored record."""
        record: dict[str, Any] = {
            "version": 1,
            "name": self.name,
            "capacity_bytes": self.capacity_bytes,
            "parameters": self.parameters,
        }
        if self.source is not None:
            record["source"] = self.source.as_record()
        return json.dumps(record).encode()


class Volumes:
    """The volumes of one cluster."""

    def __init__(self, cluster: str, files: Directories) -> None:
        self.cluster = cluster
        self.files = files

    def create(
        self,
        volume: VolumeId,
        name: str,
        size_bytes: int,
        parameters: Parameters,
    ) -> Volume:
        """Create a volume that does not exist, or complete an unfinished creation."""
        files, path = self.files, volume.path
        self.make_directory(volume)
        if self.attribute(volume, COPY) is not None:
            raise AlreadyExists(
                f"volume `{name}` is being created with the contents of a snapshot or volume; "
                "request the same source, or use another name"
            )
        inodes = inodes_max(size_bytes, parameters.inodes)
        files.set_quota(path, bytes_max=size_bytes, inodes_max=inodes)
        if parameters.trash:
            files.keep_removed(path, parameters.trash)
        self.make_data(volume, parameters)
        files.chmod(f"{path}/{DATA}", parameters.mode)
        if parameters.uid or parameters.gid:
            files.chown(f"{path}/{DATA}", parameters.uid, parameters.gid)
        created = Volume(volume, name, size_bytes, dict(parameters.as_record()))
        files.setxattr(path, RECORD, created.record())
        return created

    def make_directory(self, volume: VolumeId) -> None:
        """Make the directory of a new volume, unless an unfinished creation has left it."""
        files, path = self.files, volume.path
        self._make_parent(volume)
        try:
            files.make_directory(path, 0o711, exist_ok=True)
            names = files.listdir(path)
            if self.attribute(volume, COPY) is not None:
                return
            entries = [name for name in names if name != DATA]
            if DATA in names:
                entries += files.listdir(f"{path}/{DATA}")
        except NotADirectory as error:
            raise AlreadyExists(f"`{path}` in 3FS is a file, not a volume; move it away") from error
        if self.attribute(volume, DELETED) is not None:
            raise AlreadyExists(
                f"volume `{volume}` was deleted and its snapshots remain; delete them, or use "
                "another name"
            )
        if entries:
            raise AlreadyExists(
                f"`{path}` in 3FS has files and is not a volume of this driver; move it away, or "
                "use another `path` in the class"
            )

    def attribute(self, volume: VolumeId, name: str) -> bytes | None:
        """Return an attribute of the volume's directory, or None."""
        with suppress(NotFound, NotADirectory, NoAttribute):
            return self.files.getxattr(volume.path, name)
        return None

    def find(self, volume: VolumeId) -> Volume | None:
        """Return the volume, or None if it does not exist."""
        try:
            record = self.files.getxattr(volume.path, RECORD)
        except (NotFound, NotADirectory, NoAttribute):
            return None
        return _parsed(volume, record)

    def get(self, volume: VolumeId) -> Volume:
        """Return a volume for claims, which must exist."""
        volume_entry = self.find(volume)
        if volume_entry is None:
            raise Missing(f"volume `{volume}` does not exist: it was deleted, or never made")
        if volume.is_inline:
            raise Missing(f"`{volume}` is a pod's inline volume, which only that pod may use")
        return volume_entry

    def find_readable(self, volume: VolumeId, metrics: Metrics) -> Volume | None:
        """Return the volume for listings; an unreadable record is counted and logged."""
        try:
            return self.find(volume)
        except Unreadable as error:
            metrics.unreadable.inc()
            logger().error("unreadable volume record", volume_id=str(volume), error=error.message)
            return None

    def resize(self, volume: Volume, size_bytes: int) -> Volume:
        """Raise the hard limit, with immediate effect in pods."""
        inodes = inodes_max(size_bytes, int(volume.parameters.get("inodes", 0)))
        quota = self.files.quota(volume.id.path)
        if quota is not None and quota.inodes_max is not None:
            # A volume created by an earlier release may have a higher limit.
            inodes = max(inodes, quota.inodes_max)
        self.files.set_quota(volume.id.path, bytes_max=size_bytes, inodes_max=inodes)
        resized = replace(volume, capacity_bytes=size_bytes)
        self.files.setxattr(volume.id.path, RECORD, resized.record())
        return resized

    def modify(self, volume: Volume, changes: dict[str, int]) -> Volume:
        """Change mutable parameters, with immediate effect in pods; can be repeated.

        A limit of inodes below the number in use only refuses new ones. Without a retention, the
        trash of the volume is purged.
        """
        modified = replace(volume, parameters=volume.parameters | changes)
        path = volume.id.path
        if "inodes" in changes:
            inodes = inodes_max(volume.capacity_bytes, changes["inodes"])
            self.files.set_quota(path, bytes_max=volume.capacity_bytes, inodes_max=inodes)
        if "trash" in changes:
            self.files.keep_removed(path, changes["trash"])
        self.files.setxattr(path, RECORD, modified.record())
        return modified

    def usage(self, volume: VolumeId) -> Quota | None:
        """Return limits and usage."""
        with suppress(NotFound):
            return self.files.quota(volume.path)
        return None

    def ids(self) -> Iterator[VolumeId]:
        """Return all volumes of claims, in the order of their ids."""
        ids: list[VolumeId] = []
        for parent in self.parents():
            ids += self.ids_in(parent)
        yield from sorted(ids, key=str)

    def ids_in(self, parent: str) -> list[VolumeId]:
        """Return the volumes in one directory."""
        ids = []
        with suppress(NotFound, NotADirectory):
            for name in self.files.listdir(parent):
                with suppress(InvalidArgument):
                    ids.append(VolumeId.parse(str(VolumeId(self.cluster, parent, name))))
        return ids

    def make_data(self, volume: VolumeId, parameters: Parameters) -> None:
        """Make the mounted directory, whose layout cannot be changed later."""
        files, path = self.files, f"{volume.path}/{DATA}"

        def make() -> Stat:
            return files.make_directory(
                path,
                parameters.mode,
                exist_ok=True,
                chunk_bytes=parameters.chunk_bytes,
                stripe=parameters.stripe,
            )

        made, above = make(), files.stat(volume.path)
        chunk_bytes = parameters.chunk_bytes or above.chunk_bytes
        stripe = parameters.stripe or above.stripe
        if (made.chunk_bytes, made.stripe) != (chunk_bytes, stripe):
            # An unfinished creation with other parameters has made it.
            files.rmdir(path)
            make()

    def parents(self) -> list[str]:
        """Return the directories that have volumes in them."""
        parents = []
        with suppress(NotFound):
            for name in self.files.listdir(PARENTS):
                with suppress(InvalidArgument):
                    parents.append(check_claims_parent("parent", unquote(name)))
        return parents

    def _make_parent(self, volume: VolumeId) -> None:
        parent = volume.parent
        try:
            self._make_all(parent)
        except NotADirectory as error:
            raise InvalidArgument(
                f"parameter `path` is `{parent}`, and a part of it is a file in 3FS; use "
                "another path"
            ) from error
        if not volume.is_inline:
            # Before the volume, so that none is in an unregistered directory, and after its
            # parent, so that a refused path is not registered.
            self._make_all(PARENTS)
            self.files.make_directory(f"{PARENTS}/{quote(parent, safe='')}", 0o700, exist_ok=True)

    def _make_all(self, path: str) -> None:
        prefix = ""
        for part in path.strip("/").split("/"):
            prefix += f"/{part}"
            if prefix != "/":
                self.files.make_directory(prefix, 0o755, exist_ok=True)


def _parsed(volume: VolumeId, record: bytes) -> Volume:
    try:
        data = json.loads(record[:RECORD_BYTES_MAX])
        return Volume(
            volume,
            str(data["name"]),
            int(data["capacity_bytes"]),
            dict(data["parameters"]),
            ContentSource.of_record(data.get("source")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(
            f"the record of volume `{volume}` cannot be read ({error}); attribute {RECORD} of "
            f"`{volume.path}` was written by something else"
        ) from error

"""A volume is a directory with a record, a hard quota, and `data` in it, which pods see.

::

    /volumes/pvc-1        quota; attribute user.threefs.volume: the record (JSON)
    /volumes/pvc-1/data   what is mounted: its owner and mode are the class's

The record lies above what is mounted, so that nothing in a pod can write it. It is made last: a
directory without one is a creation that did not end, and the next attempt ends it. Where volumes
are is remembered in 3FS itself: `/.csi/parents` has one directory for each parent.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from threefs.csi.errors import AlreadyExists, InvalidArgument, Missing, Unreadable
from threefs.csi.logs import logger
from threefs.csi.parameters import inodes_max
from threefs.csi.volume_id import VolumeId, check_claims_parent
from threefs.errors import DirectoryNotEmpty, NoAttribute, NotADirectory, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threefs.client import Quota
    from threefs.csi.directories import Directories
    from threefs.csi.metrics import Metrics
    from threefs.csi.parameters import Parameters

__all__ = ["DATA", "Volume", "Volumes"]

RECORD = "user.threefs.volume"
DATA = "data"
PARENTS = "/.csi/parents"
RECORD_BYTES_MAX = 16 << 10


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume that exists."""

    id: VolumeId
    name: str
    capacity_bytes: int
    parameters: dict[str, Any]

    def record(self) -> bytes:
        """As it is kept."""
        return json.dumps(
            {
                "version": 1,
                "name": self.name,
                "capacity_bytes": self.capacity_bytes,
                "parameters": self.parameters,
            }
        ).encode()


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
        wanted: Parameters,
    ) -> Volume:
        """Make it, or end a creation that did not; the caller has looked that it is not there."""
        files, path = self.files, volume.path
        self._make_parent(volume)
        try:
            files.make_directory(path, 0o711, exist_ok=True)
            left = [entry for entry in files.listdir(path) if entry != DATA]
            if DATA in files.listdir(path):
                left += files.listdir(f"{path}/{DATA}")
        except NotADirectory as error:
            raise AlreadyExists(f"`{path}` in 3FS is a file and no volume; move it away") from error
        if left:
            raise AlreadyExists(
                f"`{path}` in 3FS has files and is no volume of this driver; move it away, or use "
                "another `path` in the class"
            )
        inodes = inodes_max(size_bytes, wanted.inodes)
        files.set_quota(path, bytes_max=size_bytes, inodes_max=inodes)
        files.make_directory(f"{path}/{DATA}", wanted.mode, exist_ok=True)
        files.chmod(f"{path}/{DATA}", wanted.mode)
        if wanted.uid or wanted.gid:
            files.chown(f"{path}/{DATA}", wanted.uid, wanted.gid)
        made = Volume(volume, name, size_bytes, dict(wanted.as_record()))
        files.setxattr(path, RECORD, made.record())
        return made

    def find(self, volume: VolumeId) -> Volume | None:
        """The volume, if it exists."""
        try:
            record = self.files.getxattr(volume.path, RECORD)
        except (NotFound, NotADirectory, NoAttribute):
            return None
        return _parsed(volume, record)

    def get(self, volume: VolumeId) -> Volume:
        """The volume, which must exist and be for claims."""
        found = self.find(volume)
        if found is None:
            raise Missing(f"volume `{volume}` does not exist: it was deleted, or never made")
        if volume.is_inline:
            raise Missing(f"`{volume}` is a pod's inline volume, which only that pod may use")
        return found

    def find_readable(self, volume: VolumeId, metrics: Metrics) -> Volume | None:
        """The volume, for lists that one bad record must not end: that is counted and told."""
        try:
            return self.find(volume)
        except Unreadable as error:
            metrics.unreadable.inc()
            logger().error("record", volume_id=str(volume), error=error.message)
            return None

    def resize(self, volume: Volume, size_bytes: int) -> Volume:
        """Raise the hard limit; pods see it at once."""
        inodes = inodes_max(size_bytes, int(volume.parameters.get("inodes", 0)))
        quota = self.files.quota(volume.id.path)
        if quota is not None and quota.inodes_max is not None:
            # A volume of an earlier release may have more than this one gives.
            inodes = max(inodes, quota.inodes_max)
        self.files.set_quota(volume.id.path, bytes_max=size_bytes, inodes_max=inodes)
        grown = Volume(volume.id, volume.name, size_bytes, volume.parameters)
        self.files.setxattr(volume.id.path, RECORD, grown.record())
        return grown

    def remove(self, volume: VolumeId) -> None:
        """Remove a volume that exists, or the rest of a creation that did not end."""
        if self.find(volume) is not None:
            self.files.remove_tree(volume.path, missing_ok=True)
            return
        # Nothing else has a record, so what has none goes only if it is as empty as `create` left
        # it: its quota goes with it, and the files of somebody else stay.
        if volume.parent not in self._parents():
            return
        with suppress(NotFound, NotADirectory, DirectoryNotEmpty):
            if self.files.listdir(volume.path) == [DATA]:
                self.files.rmdir(f"{volume.path}/{DATA}")
            self.files.rmdir(volume.path)

    def usage(self, volume: VolumeId) -> Quota | None:
        """Limits and use."""
        with suppress(NotFound):
            return self.files.quota(volume.path)
        return None

    def ids(self) -> Iterator[VolumeId]:
        """All volumes of claims, in the order of their ids."""
        found: list[VolumeId] = []
        for parent in self._parents():
            found += self.ids_in(parent)
        yield from sorted(found, key=str)

    def ids_in(self, parent: str) -> list[VolumeId]:
        """The volumes in one directory."""
        ids = []
        with suppress(NotFound, NotADirectory):
            for name in self.files.listdir(parent):
                with suppress(InvalidArgument):
                    ids.append(VolumeId.parse(str(VolumeId(self.cluster, parent, name))))
        return ids

    def _parents(self) -> list[str]:
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
                f"parameter `path` is `{parent}`, of which a part is a file in 3FS; give another"
            ) from error
        if not volume.is_inline:
            # Before the volume, so that none is in a directory that is not known, and after its
            # parent, so that a path that was refused is not looked at for ever.
            self._make_all(PARENTS)
            self.files.make_directory(f"{PARENTS}/{quote(parent, safe='')}", 0o700, exist_ok=True)

    def _make_all(self, path: str) -> None:
        made = ""
        for part in path.strip("/").split("/"):
            made += f"/{part}"
            if made != "/":
                self.files.make_directory(made, 0o755, exist_ok=True)


def _parsed(volume: VolumeId, record: bytes) -> Volume:
    try:
        data = json.loads(record[:RECORD_BYTES_MAX])
        return Volume(
            volume, str(data["name"]), int(data["capacity_bytes"]), dict(data["parameters"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(
            f"the record of volume `{volume}` cannot be read ({error}); attribute {RECORD} of "
            f"`{volume.path}` was written by something else"
        ) from error

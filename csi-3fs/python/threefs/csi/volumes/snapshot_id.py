"""Snapshot ids: `v1:CLUSTER:@NAME`. Pure.

NAME is the name of the snapshot's record, see `snapshots`. Any user who may create a
VolumeSnapshotContent in Kubernetes can write an id: every part is checked before it is used in a
path, and the record leads to the volume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from threefs.csi.errors import InvalidArgument
from threefs.csi.volumes.volume_id import (
    CLUSTER,
    DIGEST_CHARACTERS,
    ID_BYTES_MAX,
    LEAF,
    directory_name,
)

__all__ = ["SnapshotId"]


@dataclass(frozen=True, slots=True)
class SnapshotId:
    """Location of a snapshot's record."""

    cluster: str
    name: str

    def __str__(self) -> str:
        return f"v1:{self.cluster}:@{self.name}"

    @classmethod
    def make(cls, cluster: str, snapshot_name: str) -> SnapshotId:
        """Return the id of a snapshot to create: with its name, or a digest of it."""
        snapshot = cls(cluster, directory_name(snapshot_name))
        if len(str(snapshot)) <= ID_BYTES_MAX:
            return snapshot
        digest = hashlib.sha256(snapshot_name.encode()).hexdigest()[:DIGEST_CHARACTERS]
        return cls(cluster, f"sha256-{digest}")

    @classmethod
    def looks_like(cls, text: str) -> bool:
        """Whether it has the form of this driver's ids; otherwise no such snapshot exists."""
        return text.startswith("v1:")

    @classmethod
    def parse(cls, text: str) -> SnapshotId:
        """Parse an id and check its parts."""

        def invalid(reason: str) -> InvalidArgument:
            excerpt = (
                text if len(text) <= ID_BYTES_MAX else f"{text[:40]}… ({len(text)} characters)"
            )
            return InvalidArgument(
                f"snapshot_id {excerpt!r} {reason}; ids of this driver are v1:CLUSTER:@NAME"
            )

        if len(text.encode(errors="replace")) > ID_BYTES_MAX:
            raise invalid(f"is longer than {ID_BYTES_MAX} bytes")
        version, _, rest = text.partition(":")
        cluster, _, name = rest.partition(":")
        if version != "v1" or not name.startswith("@"):
            raise invalid("is not the id of a snapshot of this driver")
        if not CLUSTER.fullmatch(cluster):
            raise invalid("has an invalid cluster")
        if not LEAF.fullmatch(name[1:]):
            raise invalid("does not end in a snapshot's name")
        return cls(cluster, name[1:])

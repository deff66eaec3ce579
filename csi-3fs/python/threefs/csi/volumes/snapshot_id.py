"""Snapshot ids: `v1:CLUSTER:@NAME`. Pure.

NAME is the name of the snapshot's record, see `snapshots`. Any user who may create a
VolumeSnapshotContent in Kubernetes can write an id: every part is checked before it is used in a
path, and the record leads to the volume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from threefs.csi.volumes.volume_id import (
    DIGEST_CHARACTERS,
    ID_BYTES_MAX,
    LEAF,
    directory_name,
    invalid_id,
    split_id,
)

__all__ = ["SnapshotId"]

FORM = "v1:CLUSTER:@NAME"


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
        cluster, name = split_id("snapshot_id", FORM, text)
        if not name.startswith("@"):
            raise invalid_id("snapshot_id", FORM, text, "is not the id of a snapshot")
        if not LEAF.fullmatch(name[1:]):
            raise invalid_id("snapshot_id", FORM, text, "does not end in a snapshot's name")
        return cls(cluster, name[1:])

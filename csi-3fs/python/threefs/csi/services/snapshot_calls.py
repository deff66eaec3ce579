"""Calls for snapshots: create, delete, get, list; and the contents of new volumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from threefs.csi.errors import AlreadyExists, InvalidArgument, Missing, OutOfRange
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.services.requests import page_of
from threefs.csi.volumes.parameters import KUBERNETES
from threefs.csi.volumes.removal import remove_rest
from threefs.csi.volumes.snapshot_id import SnapshotId
from threefs.csi.volumes.snapshots import Snapshots
from threefs.csi.volumes.volume_id import VolumeId, check_name
from threefs.csi.volumes.volumes import ContentSource, Volumes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from threefs.csi.services.volume_locks import VolumeLocks
    from threefs.csi.volumes.clusters import Clusters
    from threefs.csi.volumes.snapshots import Snapshot
    from threefs.csi.volumes.volumes import Volume

__all__ = [
    "SnapshotCalls",
    "Source",
    "check_source",
    "content_source",
    "requested_source",
    "tenant_of",
]


class Source:
    """The contents of a new volume: what is copied, and the size that the volume needs."""

    def __init__(
        self,
        source: ContentSource,
        volume: VolumeId,
        snapshot: str,
        size_bytes: int,
        default_bytes: int,
    ) -> None:
        self.source = source
        self.volume = volume
        self.snapshot = snapshot
        self.size_bytes = size_bytes
        self.default_bytes = default_bytes

    def check_size(self, size_bytes: int) -> None:
        """Check that the contents fit."""
        if size_bytes < self.size_bytes:
            raise OutOfRange(
                f"{self.source.kind} `{self.source.id}` needs {self.size_bytes} bytes and the "
                f"volume would have {size_bytes}; request at least as many"
            )


class SnapshotCalls:
    """Calls for one snapshot are serialized; calls for different snapshots run concurrently."""

    def __init__(self, clusters: Clusters, locks: VolumeLocks) -> None:
        self._clusters = clusters
        self._locks = locks

    def create(self, request: csi.CreateSnapshotRequest) -> csi.CreateSnapshotResponse:
        """Create a snapshot; idempotent by its name."""
        name = check_name(request.name)
        if not request.source_volume_id:
            raise InvalidArgument("source_volume_id is missing; specify the volume")
        unknown = sorted(key for key in request.parameters if not key.startswith(KUBERNETES))
        if unknown:
            raise InvalidArgument(
                f"unknown parameter `{unknown[0][:80]}`; a VolumeSnapshotClass of this driver has "
                "none"
            )
        volume_id = _volume_id(request.source_volume_id)
        snapshot_id = SnapshotId.make(volume_id.cluster, name)
        with self._locks.hold(str(snapshot_id), "CreateSnapshot"):
            volume = self._volumes(volume_id.cluster).get(volume_id)
            snapshot = self._snapshots(volume_id.cluster).create(snapshot_id, name, volume)
        return csi.CreateSnapshotResponse(snapshot=_described(snapshot))

    def delete(self, request: csi.DeleteSnapshotRequest) -> csi.DeleteSnapshotResponse:
        """Remove a snapshot, and its volume if that was removed before; idempotent."""
        if not request.snapshot_id:
            raise InvalidArgument("snapshot_id is missing")
        if SnapshotId.looks_like(request.snapshot_id):
            snapshot_id = SnapshotId.parse(request.snapshot_id)
            with self._locks.hold(str(snapshot_id), "DeleteSnapshot"):
                snapshots = self._snapshots(snapshot_id.cluster)
                volume = snapshots.remove(snapshot_id)
                if volume is not None:
                    remove_rest(self._volumes(snapshot_id.cluster), volume)
                    # Last: until then a retry finds the volume.
                    snapshots.forget(snapshot_id)
        return csi.DeleteSnapshotResponse()

    def get(self, request: csi.GetSnapshotRequest) -> csi.GetSnapshotResponse:
        """Return a snapshot."""
        if not request.snapshot_id:
            raise InvalidArgument("snapshot_id is missing")
        return csi.GetSnapshotResponse(snapshot=_described(self._find(request.snapshot_id)))

    def page(self, request: csi.ListSnapshotsRequest) -> csi.ListSnapshotsResponse:
        """Return one page of the snapshots that match, in the order of their ids."""
        if request.max_entries < 0:
            raise InvalidArgument(f"max_entries is {request.max_entries}; it must not be negative")
        if request.snapshot_id:
            return self._one(request.snapshot_id, request.source_volume_id)
        if request.source_volume_id:
            known = {str(each.id): each for each in self._of_volume(request.source_volume_id)}
            ids = [each.id for each in known.values()]
        else:
            known = {}
            ids = sorted(
                (each for name in self._clusters.names() for each in self._snapshots(name).ids()),
                key=str,
            )
        page, next_token = page_of(ids, request.starting_token, request.max_entries, SnapshotId)
        entries = []
        for snapshot_id in page:
            snapshot = known.get(str(snapshot_id)) or self._snapshots(snapshot_id.cluster).find(
                snapshot_id
            )
            # An unfinished creation, or removed meanwhile.
            if snapshot is not None:
                entries.append(csi.ListSnapshotsResponse.Entry(snapshot=_described(snapshot)))
        return csi.ListSnapshotsResponse(entries=entries, next_token=next_token)

    def source_of(self, requested: csi.VolumeContentSource, cluster: str) -> Source:
        """Return the contents that a new volume shall have; they must exist."""
        if requested.WhichOneof("type") == "snapshot":
            snapshot = self._find(requested.snapshot.snapshot_id)
            source = ContentSource("snapshot", str(snapshot.id))
            found = Source(source, snapshot.volume, snapshot.stored_name, snapshot.size_bytes, 0)
        elif requested.WhichOneof("type") == "volume":
            volume_id = _volume_id(requested.volume.volume_id)
            volumes = self._volumes(volume_id.cluster)
            volume = volumes.get(volume_id)
            usage = volumes.usage(volume_id)
            used_bytes = min(usage.bytes_used if usage else 0, volume.capacity_bytes)
            source = ContentSource("volume", str(volume_id))
            found = Source(source, volume_id, "", used_bytes, volume.capacity_bytes)
        else:
            raise InvalidArgument(
                "volume_content_source is neither a snapshot nor a volume; specify one, or omit it"
            )
        if found.volume.cluster != cluster:
            raise InvalidArgument(
                f"volume_content_source is in cluster `{found.volume.cluster}` and the volume "
                f"would be in `{cluster}`; use a class with parameter `cluster: "
                f"{found.volume.cluster}`"
            )
        return found

    def _one(self, text: str, source_volume_id: str) -> csi.ListSnapshotsResponse:
        snapshot = None
        if SnapshotId.looks_like(text):
            snapshot_id = SnapshotId.parse(text)
            snapshot = self._snapshots(snapshot_id.cluster).find(snapshot_id)
        if snapshot is None or source_volume_id not in ("", str(snapshot.volume)):
            return csi.ListSnapshotsResponse()
        entry = csi.ListSnapshotsResponse.Entry(snapshot=_described(snapshot))
        return csi.ListSnapshotsResponse(entries=[entry])

    def _of_volume(self, text: str) -> list[Snapshot]:
        if not VolumeId.looks_like(text):
            return []
        volume_id = VolumeId.parse(text)
        return self._snapshots(volume_id.cluster).of_volume(volume_id)

    def _find(self, text: str) -> Snapshot:
        if not SnapshotId.looks_like(text):
            raise Missing(f"snapshot `{text[:128]}` does not exist; this driver did not create it")
        snapshot_id = SnapshotId.parse(text)
        return self._snapshots(snapshot_id.cluster).get(snapshot_id)

    def _snapshots(self, cluster: str) -> Snapshots:
        return Snapshots(cluster, self._clusters.of(cluster))

    def _volumes(self, cluster: str) -> Volumes:
        return Volumes(cluster, self._clusters.of(cluster))


def check_source(volume: Volume, requested: ContentSource | None) -> None:
    """Check that an existing volume of the same name has the requested source."""
    if volume.source != requested:
        existing = f"{volume.source.kind} `{volume.source.id}`" if volume.source else "no source"
        wanted = f"{requested.kind} `{requested.id}`" if requested else "none"
        raise AlreadyExists(
            f"volume `{volume.name}` exists with {existing} and {wanted} was requested; request "
            "the same, or use another name"
        )


def requested_source(requested: csi.VolumeContentSource) -> ContentSource | None:
    """Return the source that a request names, which need not exist any more."""
    kind = requested.WhichOneof("type")
    if kind == "snapshot":
        return ContentSource("snapshot", requested.snapshot.snapshot_id)
    return ContentSource("volume", requested.volume.volume_id) if kind == "volume" else None


def content_source(source: ContentSource | None) -> csi.VolumeContentSource | None:
    """Return a source as in replies."""
    if source is None:
        return None
    kinds = csi.VolumeContentSource
    if source.kind == "snapshot":
        return kinds(snapshot=kinds.SnapshotSource(snapshot_id=source.id))
    return kinds(volume=kinds.VolumeSource(volume_id=source.id))


def tenant_of(parameters: Mapping[str, str], volume: VolumeId) -> str:
    """Return the tenant of a new volume: the claim's namespace, as far as it is known."""
    namespace = parameters.get(f"{KUBERNETES}pvc/namespace", "")
    return f"{volume.cluster}:{volume.parent}:{namespace}"


def _volume_id(text: str) -> VolumeId:
    if not VolumeId.looks_like(text):
        raise Missing(f"volume `{text[:128]}` does not exist; this driver did not create it")
    return VolumeId.parse(text)


def _described(snapshot: Snapshot) -> csi.Snapshot:
    created = Timestamp()
    created.FromNanoseconds(snapshot.created_ns)
    return csi.Snapshot(
        size_bytes=snapshot.size_bytes,
        snapshot_id=str(snapshot.id),
        source_volume_id=str(snapshot.volume),
        creation_time=created,
        ready_to_use=True,
    )

"""CSI controller service: volumes, their snapshots and clones. It mounts nothing."""

# ruff: noqa: ARG002, N802 -- methods and their arguments are the specification's.

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from google.protobuf.wrappers_pb2 import Int64Value

from threefs.csi.copies.volume_copy import (
    CopyRequest,
    complete_published,
    remove_unfinished_copy,
)
from threefs.csi.errors import FailedPrecondition, InvalidArgument, Missing, OutOfRange
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.proto import csi_pb2_grpc
from threefs.csi.services.requests import check_fits, first_unsupported, page_of, size_of
from threefs.csi.services.snapshot_calls import (
    SnapshotCalls,
    check_source,
    content_source,
    requested_source,
    tenant_of,
)
from threefs.csi.services.volume_locks import VolumeLocks
from threefs.csi.volumes.parameters import Parameters, parse_mutable
from threefs.csi.volumes.removal import remove_volume
from threefs.csi.volumes.topology import Topology
from threefs.csi.volumes.volume_id import VolumeId, check_name
from threefs.csi.volumes.volumes import Volumes

if TYPE_CHECKING:
    import grpc

    from threefs.csi.copies.copies import Copies
    from threefs.csi.metrics import Metrics
    from threefs.csi.volumes.clusters import Clusters
    from threefs.csi.volumes.volumes import Volume

__all__ = ["ControllerServer"]

Rpc = csi.ControllerServiceCapability.RPC
CAPABILITIES = (
    Rpc.CREATE_DELETE_VOLUME,
    Rpc.LIST_VOLUMES,
    Rpc.GET_CAPACITY,
    Rpc.EXPAND_VOLUME,
    Rpc.GET_VOLUME,
    Rpc.VOLUME_CONDITION,
    Rpc.SINGLE_NODE_MULTI_WRITER,
    Rpc.MODIFY_VOLUME,
    Rpc.CREATE_DELETE_SNAPSHOT,
    Rpc.LIST_SNAPSHOTS,
    Rpc.GET_SNAPSHOT,
    Rpc.CLONE_VOLUME,
)


class ControllerServer(csi_pb2_grpc.ControllerServicer):
    """Calls for one volume are serialized; calls for different volumes run concurrently."""

    def __init__(
        self,
        clusters: Clusters,
        default_size_bytes: int,
        metrics: Metrics,
        copies: Copies,
        topology: Topology | None = None,
    ) -> None:
        self._clusters = clusters
        self._copies = copies
        self._topology = topology or Topology()
        self._metrics = metrics
        self._default_size_bytes = default_size_bytes
        self._locks = VolumeLocks()
        self._snapshots = SnapshotCalls(clusters, self._locks)

    def ControllerGetCapabilities(
        self, request: csi.ControllerGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.ControllerGetCapabilitiesResponse:
        """Return the capabilities."""
        capability = csi.ControllerServiceCapability
        return csi.ControllerGetCapabilitiesResponse(
            capabilities=[capability(rpc=capability.RPC(type=kind)) for kind in CAPABILITIES]
        )

    def CreateVolume(
        self, request: csi.CreateVolumeRequest, context: grpc.ServicerContext
    ) -> csi.CreateVolumeResponse:
        """Create a directory with a hard quota; idempotent."""
        name = check_name(request.name)
        if not request.volume_capabilities:
            raise InvalidArgument("volume_capabilities are missing; specify how it will be mounted")
        if reason := first_unsupported(request.volume_capabilities):
            raise InvalidArgument(f"volume_capabilities: {reason}")
        self._topology.check(request.accessibility_requirements)
        parameters = Parameters.parse(request.parameters)
        limits = parse_mutable(request.mutable_parameters)
        parameters = replace(
            parameters,
            inodes=limits.get("inodes", parameters.inodes),
            trash=limits.get("trash", parameters.trash),
        )
        volume_id = VolumeId.make(parameters.cluster, parameters.path, name)
        with self._locks.hold(str(volume_id), "CreateVolume"):
            volumes = self._volumes(parameters.cluster)
            volume = volumes.find(volume_id)
            if volume is None:
                volume = self._create(volumes, volume_id, request, parameters)
            else:
                check_fits(volume, request.capacity_range, parameters)
                check_source(volume, requested_source(request.volume_content_source))
                complete_published(volumes, volume)
        return csi.CreateVolumeResponse(volume=self._described(volume))

    def _create(
        self,
        volumes: Volumes,
        volume_id: VolumeId,
        request: csi.CreateVolumeRequest,
        parameters: Parameters,
    ) -> Volume:
        if not request.HasField("volume_content_source"):
            size_bytes = size_of(request.capacity_range, self._default_size_bytes)
            return volumes.create(volume_id, request.name, size_bytes, parameters)
        copy = self._copies.unfinished(volumes, volume_id, parameters)
        if copy is None:
            copy = self._new_copy(volume_id, request, parameters)
        else:
            # A retry: the source may be removed, or larger than at the start.
            check_fits(copy.result(), request.capacity_range, parameters)
            check_source(copy.result(), requested_source(request.volume_content_source))
        self._copies.run(copy, tenant_of(request.parameters, volume_id))
        return volumes.get(volume_id)

    def _new_copy(
        self, volume_id: VolumeId, request: csi.CreateVolumeRequest, parameters: Parameters
    ) -> CopyRequest:
        source = self._snapshots.source_of(request.volume_content_source, parameters.cluster)
        default_bytes = max(self._default_size_bytes, source.default_bytes, source.size_bytes)
        size_bytes = size_of(request.capacity_range, default_bytes)
        source.check_size(size_bytes)
        return CopyRequest(
            volume=volume_id,
            name=request.name,
            size_bytes=size_bytes,
            parameters=parameters,
            source=source.source,
            source_volume=source.volume,
            snapshot=source.snapshot,
        )

    def DeleteVolume(
        self, request: csi.DeleteVolumeRequest, context: grpc.ServicerContext
    ) -> csi.DeleteVolumeResponse:
        """Remove the directory and its contents; idempotent."""
        _require("volume_id", request.volume_id)
        if not VolumeId.looks_like(request.volume_id):
            return csi.DeleteVolumeResponse()
        volume_id = VolumeId.parse(request.volume_id)
        with self._locks.hold(request.volume_id, "DeleteVolume"):
            volumes = self._volumes(volume_id.cluster)
            if volume_id.is_inline:
                raise FailedPrecondition(
                    f"`{volume_id}` is a pod's inline volume and is removed with it; delete the pod"
                )
            self._copies.cancel(volume_id)
            remove_unfinished_copy(volumes, volume_id)
            remove_volume(volumes, volume_id)
        return csi.DeleteVolumeResponse()

    def ValidateVolumeCapabilities(
        self, request: csi.ValidateVolumeCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.ValidateVolumeCapabilitiesResponse:
        """Check whether a volume can be mounted as requested."""
        _require("volume_id", request.volume_id)
        if not request.volume_capabilities:
            raise InvalidArgument("volume_capabilities are missing; specify what to check")
        self._find(request.volume_id)
        reason = first_unsupported(request.volume_capabilities)
        if not reason:
            try:
                Parameters.parse(request.parameters)
                parse_mutable(request.mutable_parameters)
            except InvalidArgument as error:
                reason = error.message
        if reason:
            return csi.ValidateVolumeCapabilitiesResponse(message=reason)
        confirmed = csi.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=request.volume_context,
            volume_capabilities=request.volume_capabilities,
            parameters=request.parameters,
            mutable_parameters=request.mutable_parameters,
        )
        return csi.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    def ListVolumes(
        self, request: csi.ListVolumesRequest, context: grpc.ServicerContext
    ) -> csi.ListVolumesResponse:
        """Return one page of all volumes, in the order of their ids."""
        ids = sorted(
            (volume for name in self._clusters.names() for volume in self._volumes(name).ids()),
            key=str,
        )
        page, next_token = page_of(ids, request.starting_token, request.max_entries, VolumeId)
        entries = []
        down: dict[str, int] = {}
        for volume_id in page:
            volume = self._volumes(volume_id.cluster).find_readable(volume_id, self._metrics)
            if volume is not None:
                if volume_id.cluster not in down:
                    down[volume_id.cluster] = self._chains_down(volume_id.cluster)
                condition = self._condition(volume, down[volume_id.cluster])
                status = csi.ListVolumesResponse.VolumeStatus(volume_condition=condition)
                entries.append(
                    csi.ListVolumesResponse.Entry(volume=self._described(volume), status=status)
                )
        return csi.ListVolumesResponse(entries=entries, next_token=next_token)

    def GetCapacity(
        self, request: csi.GetCapacityRequest, context: grpc.ServicerContext
    ) -> csi.GetCapacityResponse:
        """Return the space for new volumes of a class; quotas reserve nothing, so it is shared."""
        parameters = Parameters.parse(request.parameters)
        elsewhere = request.HasField("accessible_topology") and not self._topology.includes(
            request.accessible_topology
        )
        if elsewhere or first_unsupported(request.volume_capabilities):
            return csi.GetCapacityResponse(available_capacity=0)
        space = self._clusters.of(parameters.cluster).statfs("/")
        return csi.GetCapacityResponse(
            available_capacity=space.bytes_free,
            maximum_volume_size=Int64Value(value=space.bytes_total),
            minimum_volume_size=Int64Value(value=1),
        )

    def ControllerExpandVolume(
        self, request: csi.ControllerExpandVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerExpandVolumeResponse:
        """Raise the quota, with immediate effect on mounted volumes, without the nodes."""
        _require("volume_id", request.volume_id)
        if not request.HasField("capacity_range"):
            raise InvalidArgument("capacity_range is missing; specify the size")
        volume_id = self._parsed(request.volume_id)
        size_bytes = size_of(request.capacity_range, 0)
        with self._locks.hold(request.volume_id, "ControllerExpandVolume"):
            volumes = self._volumes(volume_id.cluster)
            volume = volumes.get(volume_id)
            limit = request.capacity_range.limit_bytes
            if limit and volume.capacity_bytes > limit:
                raise OutOfRange(
                    f"volume `{volume_id}` has {volume.capacity_bytes} bytes, above limit_bytes "
                    f"{limit}; volumes cannot shrink"
                )
            if size_bytes > volume.capacity_bytes:
                volume = volumes.resize(volume, size_bytes)
        return csi.ControllerExpandVolumeResponse(
            capacity_bytes=volume.capacity_bytes, node_expansion_required=False
        )

    def ControllerModifyVolume(
        self, request: csi.ControllerModifyVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerModifyVolumeResponse:
        """Change the limits that a VolumeAttributesClass has; idempotent."""
        _require("volume_id", request.volume_id)
        changes = parse_mutable(request.mutable_parameters)
        volume_id = self._parsed(request.volume_id)
        with self._locks.hold(request.volume_id, "ControllerModifyVolume"):
            volumes = self._volumes(volume_id.cluster)
            volume = volumes.get(volume_id)
            if changes:
                volumes.modify(volume, changes)
        return csi.ControllerModifyVolumeResponse()

    def ControllerGetVolume(
        self, request: csi.ControllerGetVolumeRequest, context: grpc.ServicerContext
    ) -> csi.ControllerGetVolumeResponse:
        """Return a volume with its condition."""
        _require("volume_id", request.volume_id)
        volume = self._find(request.volume_id)
        status = csi.ControllerGetVolumeResponse.VolumeStatus(
            volume_condition=self._condition(volume, self._chains_down(volume.id.cluster))
        )
        return csi.ControllerGetVolumeResponse(volume=self._described(volume), status=status)

    def CreateSnapshot(
        self, request: csi.CreateSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.CreateSnapshotResponse:
        """Create a snapshot of a volume, whatever its size; idempotent."""
        return self._snapshots.create(request)

    def DeleteSnapshot(
        self, request: csi.DeleteSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.DeleteSnapshotResponse:
        """Remove a snapshot; idempotent."""
        return self._snapshots.delete(request)

    def GetSnapshot(
        self, request: csi.GetSnapshotRequest, context: grpc.ServicerContext
    ) -> csi.GetSnapshotResponse:
        """Return a snapshot."""
        return self._snapshots.get(request)

    def ListSnapshots(
        self, request: csi.ListSnapshotsRequest, context: grpc.ServicerContext
    ) -> csi.ListSnapshotsResponse:
        """Return one page of all snapshots, of those of a volume, or of one."""
        return self._snapshots.page(request)

    def _chains_down(self, cluster: str) -> int:
        status: dict[str, Any] = json.loads(self._clusters.of(cluster).status())["cluster"]
        return int(status.get("chains_down", 0))

    def _condition(self, volume: Volume, chains_down: int) -> csi.VolumeCondition:
        if chains_down:
            return csi.VolumeCondition(
                abnormal=True,
                message=f"{chains_down} chains of cluster {volume.id.cluster} have no "
                "serving target; bring a storage node back (threefs status)",
            )
        usage = self._volumes(volume.id.cluster).usage(volume.id)
        if usage and usage.bytes_max is not None and usage.bytes_used >= usage.bytes_max:
            return csi.VolumeCondition(
                abnormal=True,
                message=f"full: {usage.bytes_used} of {usage.bytes_max} bytes used; remove files "
                "or expand the claim",
            )
        return HEALTHY

    def _described(self, volume: Volume) -> csi.Volume:
        return csi.Volume(
            volume_id=str(volume.id),
            capacity_bytes=volume.capacity_bytes,
            accessible_topology=self._topology.accessible(),
            content_source=content_source(volume.source),
        )

    def _volumes(self, cluster: str) -> Volumes:
        return Volumes(cluster, self._clusters.of(cluster))

    def _find(self, volume_id: str) -> Volume:
        parsed = self._parsed(volume_id)
        return self._volumes(parsed.cluster).get(parsed)

    def _parsed(self, volume_id: str) -> VolumeId:
        if not VolumeId.looks_like(volume_id):
            raise Missing(
                f"volume `{volume_id[:128]}` does not exist; this driver did not create it"
            )
        return VolumeId.parse(volume_id)


HEALTHY = csi.VolumeCondition(abnormal=False, message="serving")


def _require(name: str, value: str) -> None:
    if not value:
        raise InvalidArgument(f"{name} is missing")

"""CSI node service: mounts volumes through the mount manager; stateless between calls.

A volume is mounted once per node (one daemon, one FUSE mount, made by the mount manager at the
staging path) and bind-mounted into each pod. Each call queries the mount manager, which reads the
kernel's mount table. No call here opens or stats a path on a mount.

The daemon uses a ticket for the volume. If the issuer requires the token of a pod, which the
kubelet passes only to NodePublishVolume, the first such call mounts, and NodeStageVolume only
checks its request. `renew_until` renews tickets while their volumes are mounted.
"""

# ruff: noqa: ARG002, N802 -- methods and their arguments are the specification's.

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from threefs.csi.errors import (
    CsiError,
    DirtyMount,
    FailedPrecondition,
    InFlight,
    InvalidArgument,
    Missing,
)
from threefs.csi.logs import logger
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.proto import csi_pb2_grpc
from threefs.csi.services.inline_volumes import is_inline
from threefs.csi.services.requests import access_of, check_path
from threefs.csi.services.volume_locks import VolumeLocks
from threefs.csi.services.volume_stats import condition_of, usage_of
from threefs.csi.volumes.node_claims import NodeClaims
from threefs.csi.volumes.topology import Topology
from threefs.csi.volumes.volume_id import ID_BYTES_MAX, VolumeId
from threefs.csi.volumes.volumes import DATA
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    import grpc

    from threefs.csi.metrics import Metrics
    from threefs.csi.mount_manager_client import MountManager, MountPoint
    from threefs.csi.services.inline_volumes import InlineVolumes
    from threefs.csi.services.requests import Access
    from threefs.csi.tickets.ticket_store import TicketStore

__all__ = ["NodeServer"]

Rpc = csi.NodeServiceCapability.RPC
CAPABILITIES = (
    Rpc.STAGE_UNSTAGE_VOLUME,
    Rpc.GET_VOLUME_STATS,
    Rpc.EXPAND_VOLUME,
    Rpc.VOLUME_CONDITION,
    Rpc.SINGLE_NODE_MULTI_WRITER,
)


RENEW_SECONDS = 30.0
"""Interval of checks for tickets to renew."""


class NodeServer(csi_pb2_grpc.NodeServicer):
    """The node service of one node."""

    def __init__(
        self,
        node_id: str,
        tickets: TicketStore,
        mount_manager: MountManager,
        inline: InlineVolumes,
        metrics: Metrics,
        claims: NodeClaims | None = None,
        topology: Topology | None = None,
    ) -> None:
        self._node_id = node_id
        self._tickets = tickets
        self._mount_manager = mount_manager
        self._inline = inline
        self._metrics = metrics
        self._locks = VolumeLocks()
        self._claims = claims or NodeClaims(node_id)
        self._topology = topology or Topology()

    def NodeGetCapabilities(
        self, request: csi.NodeGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetCapabilitiesResponse:
        """Return the capabilities."""
        capability = csi.NodeServiceCapability
        return csi.NodeGetCapabilitiesResponse(
            capabilities=[capability(rpc=capability.RPC(type=kind)) for kind in CAPABILITIES]
        )

    def NodeGetInfo(
        self, request: csi.NodeGetInfoRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetInfoResponse:
        """Return the node's id and topology; without a limit of volumes."""
        return csi.NodeGetInfoResponse(
            node_id=self._node_id, accessible_topology=self._topology.segment()
        )

    def NodeStageVolume(
        self, request: csi.NodeStageVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeStageVolumeResponse:
        """Mount the volume at the staging path, unless that requires a pod's token."""
        _check_id(request.volume_id)
        target = check_path("staging_target_path", request.staging_target_path)
        access = access_of(request.volume_capability, present=request.HasField("volume_capability"))
        volume_id = _claims_id(request.volume_id)
        if not self._tickets.needs_pod:
            with self._locks.hold(request.volume_id, "NodeStageVolume"):
                self._mount(volume_id, target, access, request.volume_context)
        return csi.NodeStageVolumeResponse()

    def NodeUnstageVolume(
        self, request: csi.NodeUnstageVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeUnstageVolumeResponse:
        """Unmount the staging path, and release the claim in 3FS."""
        _check_id(request.volume_id)
        target = check_path("staging_target_path", request.staging_target_path)
        with self._locks.hold(request.volume_id, "NodeUnstageVolume"):
            self._check_mounted_volume(request.volume_id, target)
            self._unmount(request.volume_id, target)
            mount_points, _ = self._mount_manager.state()
            if not any(_same(request.volume_id, point.volume) for point in mount_points):
                self._release(request.volume_id)
        return csi.NodeUnstageVolumeResponse()

    def NodePublishVolume(
        self, request: csi.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodePublishVolumeResponse:
        """Bind-mount the staged volume for a pod; an inline volume is created first."""
        _check_id(request.volume_id)
        target = check_path("target_path", request.target_path)
        access = access_of(request.volume_capability, present=request.HasField("volume_capability"))
        with self._locks.hold(request.volume_id, "NodePublishVolume"):
            if is_inline(request.volume_context):
                with self._inline.create(request.volume_id, request.volume_context) as volume:
                    self._mount_manager.mount(
                        str(volume.id),
                        volume.id.cluster,
                        f"{volume.id.path}/{DATA}",
                        target,
                        read_only=access.read_only or request.readonly,
                    )
            else:
                self._publish(request, target, access)
        return csi.NodePublishVolumeResponse()

    def NodeUnpublishVolume(
        self, request: csi.NodeUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeUnpublishVolumeResponse:
        """Unmount the pod's path, and remove an inline volume from 3FS."""
        _check_id(request.volume_id)
        target = check_path("target_path", request.target_path)
        with self._locks.hold(request.volume_id, "NodeUnpublishVolume"):
            self._check_mounted_volume(request.volume_id, target)
            self._mount_manager.unmount(target)
            if VolumeId.looks_like(request.volume_id):
                self._tickets.remove_pod(_parsed(request.volume_id), target)
            else:
                self._inline.remove(request.volume_id)
        return csi.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(
        self, request: csi.NodeGetVolumeStatsRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetVolumeStatsResponse:
        """Return usage and condition, without touching the mount."""
        _check_id(request.volume_id)
        path = _path(request.volume_path)
        mount_points, mounts = self._mount_manager.state()
        point = self._mount_point(request.volume_id, path, mount_points)
        condition = condition_of(point, mounts)
        volume_id = VolumeId.parse(point.volume)
        try:
            files = self._tickets.files(volume_id)
            quota = files.quota(volume_id.path)
            if (holder := self._claims.holder(volume_id, files)) not in ("", self._node_id):
                condition = csi.VolumeCondition(
                    abnormal=True,
                    message=f"node `{holder}` has claimed this volume, which only one node may "
                    "use; delete the pods that use it here",
                )
        except (CsiError, OSError) as error:
            condition = csi.VolumeCondition(abnormal=True, message=f"3FS does not answer: {error}")
            quota = None
        return csi.NodeGetVolumeStatsResponse(usage=usage_of(quota), volume_condition=condition)

    def NodeExpandVolume(
        self, request: csi.NodeExpandVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeExpandVolumeResponse:
        """Return the size: the quota in 3FS is enforced without the node."""
        _check_id(request.volume_id)
        path = _path(request.volume_path)
        volume_id = _parsed(request.volume_id)
        mount_points, _ = self._mount_manager.state()
        self._mount_point(request.volume_id, path, mount_points)
        quota = self._tickets.files(volume_id).quota(volume_id.path)
        return csi.NodeExpandVolumeResponse(capacity_bytes=(quota and quota.bytes_max) or 0)

    def _publish(self, request: csi.NodePublishVolumeRequest, target: str, access: Access) -> None:
        if not request.staging_target_path:
            raise FailedPrecondition("staging_target_path is missing; stage the volume first")
        staging = check_path("staging_target_path", request.staging_target_path)
        parsed = _claims_id(request.volume_id)
        volume_id = str(parsed)
        mount_points, _ = self._mount_manager.state()
        targets = {point.target for point in mount_points if point.volume == volume_id}
        if staging in targets:
            self._tickets.refresh(parsed, request.volume_context)
        elif self._tickets.needs_pod:
            self._mount(parsed, staging, access, request.volume_context)
        else:
            raise FailedPrecondition(
                f"volume `{volume_id}` is not staged at `{staging}`; stage it first"
            )
        # Before the bind: a ticket is renewed only for registered pods.
        self._tickets.add_pod(parsed, target, request.volume_context)
        other_targets = sorted(targets - {staging, target})
        if access.single_pod and other_targets:
            raise FailedPrecondition(
                f"volume `{volume_id}` is for one pod (ReadWriteOncePod) and published at "
                f"`{other_targets[0]}` already; unpublish it there first"
            )
        self._mount_manager.bind(
            staging,
            target,
            read_only=access.read_only or request.readonly,
            flags=access.flags,
        )

    def renew_until(self, stop: threading.Event) -> None:
        """Renew the tickets of mounted volumes until `stop` is set."""
        while not stop.wait(RENEW_SECONDS):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 -- retried at the next interval
                logger().error("ticket renewal failed", error=repr(error))

    def renew(self) -> None:
        """Renew the tickets that are due; a failure does not affect other tickets."""
        mount_points, _ = self._mount_manager.state()
        mounted = {point.volume for point in mount_points}
        for volume in sorted(mounted):
            with suppress(InvalidArgument, InFlight):
                parsed = VolumeId.parse(volume)
                tickets = self._inline.tickets if parsed.is_inline else self._tickets
                with self._locks.hold(volume, "renewal"):
                    try:
                        tickets.renew(parsed)
                    except (CsiError, ThreeFSError) as error:
                        logger().error("ticket expired", volume_id=volume, error=str(error))
        self._tickets.remove_expired(mounted)

    def _mount(
        self, volume_id: VolumeId, target: str, access: Access, context: Mapping[str, str]
    ) -> None:
        """Obtain a ticket, and a single-node volume's claim, then mount."""
        self._tickets.issue(volume_id, context)
        if access.single_node:
            self._claims.acquire(volume_id, self._tickets.files(volume_id))
        self._mount_manager.mount(
            str(volume_id),
            volume_id.cluster,
            f"{volume_id.path}/{DATA}",
            target,
            read_only=access.read_only,
            node=self._node_id if access.single_node else "",
        )

    def _unmount(self, volume_id: str, target: str) -> None:
        """Unmount. If requests may still be in progress, the claim is left to expire."""
        try:
            outcome = self._mount_manager.unmount(target)
        except (FailedPrecondition, DirtyMount):
            raise  # the volume is still mounted
        except CsiError:
            self._claims.let_expire(volume_id)
            raise
        if outcome.volume is not None:
            self._metrics.unmounts.labels(outcome.result).inc()
        if outcome.data_lost:
            fields = {"volume_id": volume_id, "staging_target_path": target}
            logger().error("detached, data not written", **fields, error=outcome.data_lost)
        if not outcome.clean:
            self._claims.let_expire(volume_id)

    def _release(self, volume_id: str) -> None:
        """Release claim and ticket. Best effort: an unreleased claim expires."""
        with suppress(CsiError, OSError):
            parsed = VolumeId.parse(volume_id)
            # Without the ticket the claim could not be released later.
            if self._claims.release(parsed, self._tickets.files(parsed, short_timeout=True)):
                self._tickets.remove(parsed)

    def _check_mounted_volume(self, volume_id: str, target: str) -> None:
        """Refuse a call for one volume that would unmount another."""
        mount_points, _ = self._mount_manager.state()
        for point in mount_points:
            if point.target == target and not _same(volume_id, point.volume):
                raise Missing(
                    f"volume `{volume_id}` is not mounted at `{target}`: `{point.volume}` is"
                )

    def _mount_point(self, volume_id: str, path: str, mount_points: list[MountPoint]) -> MountPoint:
        for point in mount_points:
            if point.target == path and _same(volume_id, point.volume):
                return point
        raise Missing(f"volume `{volume_id}` is not mounted at `{path}`")


def _path(volume_path: str) -> str:
    """Check that a path is given; an invalid path is not in the mount table."""
    if not volume_path:
        raise InvalidArgument("volume_path is missing")
    return volume_path


def _same(volume_id: str, mounted: str) -> bool:
    """Compare ids: Kubernetes uses an inline volume's handle, the mount table its path in 3FS."""
    if VolumeId.looks_like(volume_id):
        return volume_id == mounted
    try:
        return VolumeId.parse(mounted) == VolumeId.make(
            VolumeId.parse(mounted).cluster, VolumeId.parse(mounted).parent, volume_id
        )
    except InvalidArgument:
        return False


def _check_id(volume_id: str) -> None:
    if not volume_id:
        raise InvalidArgument("volume_id is missing")
    if len(volume_id.encode(errors="replace")) > ID_BYTES_MAX:
        raise InvalidArgument(f"volume_id is longer than {ID_BYTES_MAX} bytes")


def _parsed(volume_id: str) -> VolumeId:
    if not VolumeId.looks_like(volume_id):
        raise Missing(f"volume `{volume_id}` does not exist; this driver did not create it")
    return VolumeId.parse(volume_id)


def _claims_id(volume_id: str) -> VolumeId:
    parsed = _parsed(volume_id)
    if parsed.is_inline:
        raise Missing(f"`{volume_id}` is a pod's inline volume, which only that pod may use")
    return parsed

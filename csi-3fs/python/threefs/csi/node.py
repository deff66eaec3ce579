"""The node service: asks the holder to mount, show and undo; knows nothing between two calls.

A volume is mounted once a node (one daemon, one FUSE mount, made by the holder at the staging path)
and shown by a bind mount to each pod. What is mounted where is asked of the holder each time, which
reads the kernel's table. No call here opens or stats a path on a mount.

The daemon works with a ticket for the volume. Where the issuer wants the token of a pod, which the
kubelet gives with NodePublishVolume alone, the first such call mounts, and NodeStageVolume checks
its request and does nothing else. `renew_until` renews tickets while their volumes are mounted.
"""

# ruff: noqa: ARG002, N802 -- methods and their arguments are the specification's.

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from threefs.csi.claims import Claims
from threefs.csi.errors import (
    CsiError,
    FailedPrecondition,
    InFlight,
    InvalidArgument,
    Missing,
    Unwritten,
)
from threefs.csi.inline import is_inline
from threefs.csi.locks import VolumeLocks
from threefs.csi.logs import logger
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.proto import csi_pb2_grpc
from threefs.csi.requests import access_of, check_path
from threefs.csi.stats import condition_of, usage_of
from threefs.csi.volume_id import ID_BYTES_MAX, VolumeId
from threefs.csi.volumes import DATA
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    import grpc

    from threefs.csi.holder_client import Holder, MountedAt
    from threefs.csi.inline import InlineVolumes
    from threefs.csi.metrics import Metrics
    from threefs.csi.requests import Access
    from threefs.csi.tickets import Tickets

__all__ = ["Node"]

Rpc = csi.NodeServiceCapability.RPC
CAPABILITIES = (
    Rpc.STAGE_UNSTAGE_VOLUME,
    Rpc.GET_VOLUME_STATS,
    Rpc.EXPAND_VOLUME,
    Rpc.VOLUME_CONDITION,
    Rpc.SINGLE_NODE_MULTI_WRITER,
)


RENEW_SECONDS = 30.0
"""Between two looks at which tickets are due."""


class Node(csi_pb2_grpc.NodeServicer):
    """One a node."""

    def __init__(
        self,
        node_id: str,
        tickets: Tickets,
        holder: Holder,
        inline: InlineVolumes,
        metrics: Metrics,
        claims: Claims | None = None,
    ) -> None:
        self._node_id = node_id
        self._tickets = tickets
        self._holder = holder
        self._inline = inline
        self._metrics = metrics
        self._locks = VolumeLocks()
        self._claims = claims or Claims(node_id)

    def NodeGetCapabilities(
        self, request: csi.NodeGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetCapabilitiesResponse:
        """What is served."""
        capability = csi.NodeServiceCapability
        return csi.NodeGetCapabilitiesResponse(
            capabilities=[capability(rpc=capability.RPC(type=kind)) for kind in CAPABILITIES]
        )

    def NodeGetInfo(
        self, request: csi.NodeGetInfoRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetInfoResponse:
        """This node; any number of volumes, reachable from everywhere."""
        return csi.NodeGetInfoResponse(node_id=self._node_id)

    def NodeStageVolume(
        self, request: csi.NodeStageVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeStageVolumeResponse:
        """Mount the volume at the staging path, unless that needs a pod's token."""
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
        """Undo the mount at the staging path; 3FS is only told that its claim has ended."""
        _check_id(request.volume_id)
        target = check_path("staging_target_path", request.staging_target_path)
        with self._locks.hold(request.volume_id, "NodeUnstageVolume"):
            self._not_of_others(request.volume_id, target)
            self._undo(request.volume_id, target)
            table, _ = self._holder.state()
            if not any(_same(request.volume_id, mounted.volume) for mounted in table):
                self._leave(request.volume_id)
        return csi.NodeUnstageVolumeResponse()

    def NodePublishVolume(
        self, request: csi.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodePublishVolumeResponse:
        """Show the staged volume to a pod; an inline volume is made first."""
        _check_id(request.volume_id)
        target = check_path("target_path", request.target_path)
        access = access_of(request.volume_capability, present=request.HasField("volume_capability"))
        with self._locks.hold(request.volume_id, "NodePublishVolume"):
            if is_inline(request.volume_context):
                with self._inline.making(request.volume_id, request.volume_context) as volume:
                    self._holder.mount(
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
        """Take it from the pod again; 3FS is asked only to remove an inline volume."""
        _check_id(request.volume_id)
        target = check_path("target_path", request.target_path)
        with self._locks.hold(request.volume_id, "NodeUnpublishVolume"):
            self._not_of_others(request.volume_id, target)
            self._holder.unmount(target)
            if VolumeId.looks_like(request.volume_id):
                self._tickets.end_use(_parsed(request.volume_id), target)
            else:
                self._inline.remove(request.volume_id)
        return csi.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(
        self, request: csi.NodeGetVolumeStatsRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetVolumeStatsResponse:
        """Use and condition; both without touching the mount."""
        _check_id(request.volume_id)
        path = _path(request.volume_path)
        table, held = self._holder.state()
        mounted = self._mounted(request.volume_id, path, table)
        condition = condition_of(mounted, held)
        volume_id = VolumeId.parse(mounted.volume)
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
        """Nothing is left to do on a node: the quota is 3FS's. Says the size."""
        _check_id(request.volume_id)
        path = _path(request.volume_path)
        volume_id = _parsed(request.volume_id)
        table, _ = self._holder.state()
        self._mounted(request.volume_id, path, table)
        quota = self._tickets.files(volume_id).quota(volume_id.path)
        return csi.NodeExpandVolumeResponse(capacity_bytes=(quota and quota.bytes_max) or 0)

    def _publish(self, request: csi.NodePublishVolumeRequest, target: str, access: Access) -> None:
        if not request.staging_target_path:
            raise FailedPrecondition("staging_target_path is missing; stage the volume first")
        staging = check_path("staging_target_path", request.staging_target_path)
        parsed = _claims_id(request.volume_id)
        volume_id = str(parsed)
        table, _ = self._holder.state()
        places = {mounted.target for mounted in table if mounted.volume == volume_id}
        if staging in places:
            self._tickets.refresh(parsed, request.volume_context)
        elif self._tickets.needs_pod:
            self._mount(parsed, staging, access, request.volume_context)
        else:
            raise FailedPrecondition(
                f"volume `{volume_id}` is not staged at `{staging}`; stage it first"
            )
        # First: a ticket is renewed for the pods that are known.
        self._tickets.use(parsed, target, request.volume_context)
        others = sorted(places - {staging, target})
        if access.single_pod and others:
            raise FailedPrecondition(
                f"volume `{volume_id}` is for one pod (ReadWriteOncePod) and published at "
                f"`{others[0]}` already; unpublish it there first"
            )
        self._holder.bind(
            staging,
            target,
            read_only=access.read_only or request.readonly,
            flags=access.flags,
        )

    def renew_until(self, stop: threading.Event) -> None:
        """Renew the tickets of mounted volumes in time."""
        while not stop.wait(RENEW_SECONDS):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 -- one that fails must not be the last
                logger().error("renewal of tickets", error=repr(error))

    def renew(self) -> None:
        """Renew the tickets that are due; one that cannot be renewed does not keep the others."""
        table, _ = self._holder.state()
        mounted = {one.volume for one in table}
        for volume in sorted(mounted):
            with suppress(InvalidArgument, InFlight):
                parsed = VolumeId.parse(volume)
                tickets = self._inline.tickets if parsed.is_inline else self._tickets
                with self._locks.hold(volume, "renewal"):
                    try:
                        tickets.renew(parsed)
                    except (CsiError, ThreeFSError) as error:
                        logger().error("ticket has ended", volume_id=volume, error=str(error))
        self._tickets.forget_expired(mounted)

    def _mount(
        self, volume_id: VolumeId, target: str, access: Access, context: Mapping[str, str]
    ) -> None:
        """Get a ticket and the claim of a volume for one node, then mount."""
        self._tickets.issue(volume_id, context)
        if access.single_node:
            self._claims.take(volume_id, self._tickets.files(volume_id))
        self._holder.mount(
            str(volume_id),
            volume_id.cluster,
            f"{volume_id.path}/{DATA}",
            target,
            read_only=access.read_only,
            node=self._node_id if access.single_node else "",
        )

    def _undo(self, volume_id: str, target: str) -> None:
        """Undo a mount. What was not waited for may still be done: then the claim is left alone."""
        try:
            undone = self._holder.unmount(target)
        except (FailedPrecondition, Unwritten):
            raise  # Nothing was undone.
        except CsiError:
            self._claims.leave(volume_id)
            raise
        if undone.volume is not None:
            self._metrics.undone.labels(undone.how).inc()
        if undone.unwritten:
            told = {"volume_id": volume_id, "staging_target_path": target}
            logger().error("detached, data not written", **told, error=undone.unwritten)
        if not undone.clean:
            self._claims.leave(volume_id)

    def _leave(self, volume_id: str) -> None:
        """Give back claim and ticket. Best effort and brief: a claim that is not renewed ends."""
        with suppress(CsiError, OSError):
            parsed = VolumeId.parse(volume_id)
            # Without the ticket the claim could not be given back later.
            if self._claims.give_back(parsed, self._tickets.files(parsed, briefly=True)):
                self._tickets.forget(parsed)

    def _not_of_others(self, volume_id: str, target: str) -> None:
        """A call for one volume must not undo a mount of another."""
        table, _ = self._holder.state()
        for mounted in table:
            if mounted.target == target and not _same(volume_id, mounted.volume):
                raise Missing(
                    f"volume `{volume_id}` is not mounted at `{target}`: `{mounted.volume}` is"
                )

    def _mounted(self, volume_id: str, path: str, table: list[MountedAt]) -> MountedAt:
        for mounted in table:
            if mounted.target == path and _same(volume_id, mounted.volume):
                return mounted
        raise Missing(f"volume `{volume_id}` is not mounted at `{path}`")


def _path(volume_path: str) -> str:
    """A place to look for in the table; what no place can be is simply not there."""
    if not volume_path:
        raise InvalidArgument("volume_path is missing")
    return volume_path


def _same(volume_id: str, mounted: str) -> bool:
    """Kubernetes names an inline volume by its handle, the mount table by its place in 3FS."""
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
        raise Missing(f"volume `{volume_id}` does not exist; this driver never made it")
    return VolumeId.parse(volume_id)


def _claims_id(volume_id: str) -> VolumeId:
    parsed = _parsed(volume_id)
    if parsed.is_inline:
        raise Missing(f"`{volume_id}` is a pod's inline volume, which only that pod may use")
    return parsed

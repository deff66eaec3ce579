"""Inline volumes: directories created with a pod and removed with it.

The node plugin creates them with the cluster's key, which it needs for nothing else: without inline
volumes, nodes have no key. The author of a pod controls the volume's attributes, so `size` is the
only one; the driver sets cluster, path, owner and mode. A node's inline volumes are
`/inline/NODE/*` of the default cluster, below a directory that is not part of any volume, and no
other path is created, listed or removed for them. A directory that cannot be removed because 3FS
does not answer does not delay the end of the pod: a sweep removes the directories of this node that
are not mounted any more.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from threefs.csi.errors import CsiError, InFlight, InvalidArgument
from threefs.csi.logs import logger
from threefs.csi.services.volume_locks import VolumeLocks
from threefs.csi.volumes.parameters import DEFAULT_CLUSTER, KUBERNETES, Parameters, quantity_bytes
from threefs.csi.volumes.volume_id import INLINE_PARENT, VolumeId
from threefs.csi.volumes.volumes import Volumes
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping

    from threefs.csi.metrics import Metrics
    from threefs.csi.mount_manager_client import MountManager
    from threefs.csi.tickets.ticket_store import TicketStore
    from threefs.csi.volumes.clusters import Clusters
    from threefs.csi.volumes.volumes import Volume

__all__ = ["InlineVolumes", "is_inline"]

EPHEMERAL = "csi.storage.k8s.io/ephemeral"
SWEEP_SECONDS = 60.0
REMOVE_SECONDS = 2.0
"""Timeout of 3FS when a pod ends; the sweep has more time."""
SIZE = "size"
NODE_CHARACTERS = 16


def is_inline(context: Mapping[str, str]) -> bool:
    """Whether the kubelet requests an inline volume."""
    return context.get(EPHEMERAL) == "true"


class InlineVolumes:
    """The inline volumes of one node; `size_max_bytes` 0 disables them."""

    def __init__(
        self,
        node_id: str,
        clusters: Clusters,
        tickets: TicketStore,
        mount_manager: MountManager,
        metrics: Metrics,
        default_size_bytes: int,
        size_max_bytes: int,
    ) -> None:
        self._clusters = clusters
        self._short_timeout = clusters.within(REMOVE_SECONDS)
        self.tickets = tickets
        self._mount_manager = mount_manager
        self._metrics = metrics
        self._default_size_bytes = min(default_size_bytes, size_max_bytes)
        self._size_max_bytes = size_max_bytes
        self._locks = VolumeLocks()
        # A node's name may be longer than an id; its digest is not.
        digest = hashlib.sha256(node_id.encode()).hexdigest()[:NODE_CHARACTERS]
        self.parent = f"{INLINE_PARENT}/{digest}"

    @contextmanager
    def create(self, handle: str, context: Mapping[str, str]) -> Iterator[Volume]:
        """Create the directory of a pod's volume and its ticket; sweeps skip it meanwhile."""
        size_bytes = self._size_bytes(context)
        volume_id = self._id(handle)
        volumes = Volumes(DEFAULT_CLUSTER, self._clusters.of(DEFAULT_CLUSTER))
        with self._locks.hold(str(volume_id), "NodePublishVolume"):
            existing = volumes.find(volume_id)
            volume = existing or volumes.create(volume_id, handle, size_bytes, Parameters())
            if existing is None:
                self.tickets.issue(volume_id, context)
            else:
                self.tickets.refresh(volume_id, context)
            yield volume

    def remove(self, handle: str) -> None:
        """Remove the directory of a pod's volume, if there is one."""
        volume_id = self._id(handle)
        self.tickets.remove(volume_id)
        try:
            with self._locks.hold(str(volume_id), "NodeUnpublishVolume"):
                self._short_timeout.of(DEFAULT_CLUSTER).remove_tree(volume_id.path, missing_ok=True)
        except (CsiError, ThreeFSError) as error:
            self._metrics.removals_deferred.inc()
            logger().warning(
                "removal of inline volume deferred", volume_id=handle, error=str(error)
            )

    def sweep(self) -> int:
        """Remove directories that no pod of this node has mounted; return their number."""
        files = self._clusters.of(DEFAULT_CLUSTER)
        count = 0
        for volume_id in Volumes(DEFAULT_CLUSTER, files).ids_in(self.parent):
            # A call for it is in progress: checked again by the next sweep.
            with suppress(InFlight), self._locks.hold(str(volume_id), "sweep"):
                mount_points, _ = self._mount_manager.state()
                if not any(point.volume == str(volume_id) for point in mount_points):
                    files.remove_tree(volume_id.path, missing_ok=True)
                    count += 1
        return count

    def sweep_until(self, stop: threading.Event) -> None:
        """Sweep once a minute, if this node has the key."""
        if not self._clusters.names():
            return
        while not stop.wait(SWEEP_SECONDS):
            try:
                self.sweep()
            except (CsiError, ThreeFSError) as error:
                logger().warning("sweep of inline volumes failed", error=str(error))

    def _id(self, handle: str) -> VolumeId:
        return VolumeId.make(DEFAULT_CLUSTER, self.parent, handle)

    def _size_bytes(self, context: Mapping[str, str]) -> int:
        if self._size_max_bytes == 0:
            raise InvalidArgument(
                "inline volumes are disabled on this cluster; use a PersistentVolumeClaim or "
                "a generic ephemeral volume"
            )
        unknown = sorted(
            name for name in context if name != SIZE and not name.startswith(KUBERNETES)
        )
        if unknown:
            raise InvalidArgument(
                f"unknown attribute `{unknown[0][:80]}`; inline volumes support only `size`"
            )
        if SIZE not in context:
            return self._default_size_bytes
        size_bytes = quantity_bytes("attribute `size`", context[SIZE])
        if size_bytes > self._size_max_bytes:
            raise InvalidArgument(
                f"attribute `size` is {size_bytes} bytes, above the maximum of "
                f"{self._size_max_bytes} for inline volumes; use a PersistentVolumeClaim"
            )
        return size_bytes

"""Inline volumes: directories that are made with a pod and removed with it.

The node plugin makes them with the cluster's key, which it needs for nothing else: where inline
volumes are off, nodes have no key. Who writes a pod writes the volume's attributes, so `size` is
the only one: cluster, place, owner and mode are the driver's. A node's inline volumes are
`/inline/NODE/*` of the default cluster, below a directory that no volume shows, and nothing else is
ever made, looked for or removed for them. What cannot be removed at once, because 3FS does not
answer, does not hold up the pod's end: a sweep removes the directories of this node that are not
mounted here any more.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from threefs.csi.errors import CsiError, InFlight, InvalidArgument
from threefs.csi.locks import VolumeLocks
from threefs.csi.logs import logger
from threefs.csi.parameters import DEFAULT_CLUSTER, KUBERNETES, Parameters, quantity_bytes
from threefs.csi.volume_id import INLINE_PARENT, VolumeId
from threefs.csi.volumes import Volumes
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping

    from threefs.csi.directories import Clusters
    from threefs.csi.holder_client import Holder
    from threefs.csi.metrics import Metrics
    from threefs.csi.tickets import Tickets
    from threefs.csi.volumes import Volume

__all__ = ["InlineVolumes", "is_inline"]

EPHEMERAL = "csi.storage.k8s.io/ephemeral"
SWEEP_SECONDS = 60.0
REMOVE_SECONDS = 2.0
"""Deadline of 3FS's answer when a pod ends; the sweep has more time."""
SIZE = "size"
NODE_CHARACTERS = 16


def is_inline(context: Mapping[str, str]) -> bool:
    """Whether the kubelet asks for a volume that lives and dies with the pod."""
    return context.get(EPHEMERAL) == "true"


class InlineVolumes:
    """The inline volumes of one node; `size_max_bytes` 0 switches them off."""

    def __init__(
        self,
        node_id: str,
        clusters: Clusters,
        tickets: Tickets,
        holder: Holder,
        metrics: Metrics,
        default_size_bytes: int,
        size_max_bytes: int,
    ) -> None:
        self._clusters = clusters
        self._briefly = clusters.within(REMOVE_SECONDS)
        self.tickets = tickets
        self._holder = holder
        self._metrics = metrics
        self._default_size_bytes = min(default_size_bytes, size_max_bytes)
        self._size_max_bytes = size_max_bytes
        self._locks = VolumeLocks()
        # A node's name may be longer than an id; its digest is not.
        digest = hashlib.sha256(node_id.encode()).hexdigest()[:NODE_CHARACTERS]
        self.parent = f"{INLINE_PARENT}/{digest}"

    @contextmanager
    def making(self, handle: str, context: Mapping[str, str]) -> Iterator[Volume]:
        """Make the directory of a pod's volume and its ticket; sweeps leave it alone meanwhile."""
        size_bytes = self._size_bytes(context)
        volume_id = self._id(handle)
        volumes = Volumes(DEFAULT_CLUSTER, self._clusters.of(DEFAULT_CLUSTER))
        with self._locks.hold(str(volume_id), "NodePublishVolume"):
            found = volumes.find(volume_id)
            volume = found or volumes.create(volume_id, handle, size_bytes, Parameters())
            if found is None:
                self.tickets.issue(volume_id, context)
            else:
                self.tickets.refresh(volume_id, context)
            yield volume

    def remove(self, handle: str) -> None:
        """Remove the directory of a pod's volume, if there is one."""
        volume_id = self._id(handle)
        self.tickets.forget(volume_id)
        try:
            with self._locks.hold(str(volume_id), "NodeUnpublishVolume"):
                self._briefly.of(DEFAULT_CLUSTER).remove_tree(volume_id.path, missing_ok=True)
        except (CsiError, ThreeFSError) as error:
            self._metrics.ephemeral_left.inc()
            logger().warning("inline volume is removed later", volume_id=handle, error=str(error))

    def sweep(self) -> int:
        """Remove those that no pod of this node has mounted; returns their number."""
        files = self._clusters.of(DEFAULT_CLUSTER)
        count = 0
        for volume_id in Volumes(DEFAULT_CLUSTER, files).ids_in(self.parent):
            # A call works on it: it is looked at again by the next sweep.
            with suppress(InFlight), self._locks.hold(str(volume_id), "sweep"):
                table, _ = self._holder.state()
                if not any(mounted.volume == str(volume_id) for mounted in table):
                    files.remove_tree(volume_id.path, missing_ok=True)
                    count += 1
        return count

    def sweep_until(self, stop: threading.Event) -> None:
        """Sweep once a minute, where this node has the key."""
        if not self._clusters.names():
            return
        while not stop.wait(SWEEP_SECONDS):
            try:
                self.sweep()
            except (CsiError, ThreeFSError) as error:
                logger().warning("sweep of inline volumes", error=str(error))

    def _id(self, handle: str) -> VolumeId:
        return VolumeId.make(DEFAULT_CLUSTER, self.parent, handle)

    def _size_bytes(self, context: Mapping[str, str]) -> int:
        if self._size_max_bytes == 0:
            raise InvalidArgument(
                "inline volumes are switched off on this cluster; use a PersistentVolumeClaim or "
                "a generic ephemeral volume"
            )
        unknown = sorted(
            name for name in context if name != SIZE and not name.startswith(KUBERNETES)
        )
        if unknown:
            raise InvalidArgument(
                f"attribute `{unknown[0][:80]}` is not known; an inline volume has `size` alone"
            )
        if SIZE not in context:
            return self._default_size_bytes
        size_bytes = quantity_bytes("attribute `size`", context[SIZE])
        if size_bytes > self._size_max_bytes:
            raise InvalidArgument(
                f"attribute `size` is {size_bytes} bytes, above the {self._size_max_bytes} that an "
                "inline volume may have here; use a PersistentVolumeClaim"
            )
        return size_bytes

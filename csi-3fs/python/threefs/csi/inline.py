"""Inline volumes: directories that are made with a pod and removed with it.

The record of one says on which node its pod is. What cannot be removed at once, because 3FS does
not answer, does not hold up the pod's end: a sweep removes inline volumes of this node that are not
mounted here any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from threefs.csi.errors import AlreadyExists, CsiError
from threefs.csi.logs import logger
from threefs.csi.parameters import INLINE, Parameters, quantity_bytes
from threefs.csi.volume_id import VolumeId, directory_name
from threefs.csi.volumes import Volumes
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from threefs.csi.directories import Clusters
    from threefs.csi.holder_client import Holder
    from threefs.csi.metrics import Metrics
    from threefs.csi.volumes import Volume

__all__ = ["InlineVolumes", "is_inline"]

EPHEMERAL = "csi.storage.k8s.io/ephemeral"
SWEEP_SECONDS = 60.0
SIZE = "size"
OWN_KEYS = (SIZE,)


def is_inline(context: Mapping[str, str]) -> bool:
    """Whether the kubelet asks for a volume that lives and dies with the pod."""
    return context.get(EPHEMERAL) == "true"


class InlineVolumes:
    """Those of one node."""

    def __init__(
        self,
        node_id: str,
        clusters: Clusters,
        holder: Holder,
        metrics: Metrics,
        default_size_bytes: int,
    ) -> None:
        self._node_id = node_id
        self._clusters = clusters
        self._holder = holder
        self._metrics = metrics
        self._default_size_bytes = default_size_bytes

    def make(self, handle: str, context: Mapping[str, str]) -> Volume:
        """Make the directory of a pod's volume; it may be there from an attempt before."""
        wanted = {name: text for name, text in context.items() if name not in OWN_KEYS}
        parameters = Parameters.parse(wanted)
        size_bytes = self._default_size_bytes
        if SIZE in context:
            size_bytes = quantity_bytes("attribute `size`", context[SIZE])
        volume_id = VolumeId.make(parameters.cluster, parameters.path, handle)
        volumes = Volumes(parameters.cluster, self._clusters.of(parameters.cluster))
        found = volumes.find(volume_id)
        if found is None:
            extra = {INLINE: self._node_id}
            return volumes.create(volume_id, handle, size_bytes, parameters, extra)
        if found.parameters.get(INLINE) != self._node_id:
            raise AlreadyExists(f"`{volume_id}` exists and is no inline volume of this node")
        return found

    def remove(self, handle: str) -> None:
        """Remove the directory of a pod's volume, whatever its class parameters were."""
        leaf = directory_name(handle)
        try:
            for volumes, volume in self._own():
                if volume.id.name == leaf:
                    volumes.remove(volume.id)
        except (CsiError, ThreeFSError) as error:
            self._metrics.ephemeral_left.inc()
            logger().warning("inline volume is removed later", volume_id=handle, error=str(error))

    def sweep(self) -> int:
        """Remove those that no pod of this node has mounted; gives how many."""
        # Looked at first: a volume that is made in between must not be taken for a left one.
        left = list(self._own())
        table, _ = self._holder.state()
        mounted = {one.volume for one in table}
        count = 0
        for volumes, volume in left:
            if str(volume.id) not in mounted:
                volumes.remove(volume.id)
                count += 1
        return count

    def sweep_until(self, stop: threading.Event) -> None:
        """Sweep now and then."""
        while not stop.wait(SWEEP_SECONDS):
            try:
                self.sweep()
            except (CsiError, ThreeFSError) as error:
                logger().warning("sweep of inline volumes", error=str(error))

    def _own(self) -> list[tuple[Volumes, Volume]]:
        found = []
        for name in self._clusters.names():
            volumes = Volumes(name, self._clusters.of(name))
            for volume_id in volumes.ids():
                volume = volumes.find(volume_id)
                if volume is not None and volume.parameters.get(INLINE) == self._node_id:
                    found.append((volumes, volume))
        return found

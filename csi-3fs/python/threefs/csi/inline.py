"""Inline volumes: directories that are made with a pod and removed with it.

The record of one says on which node its pod is, and `/.csi/inline/NODE` in 3FS has an empty
directory for each of the node's: made before the volume, removed after it, so that a node finds its
own without reading anything of others. What cannot be removed at once, because 3FS does not answer,
does not hold up the pod's end: a sweep removes inline volumes of this node that are not mounted
here any more. Versions before kept no such list: the first sweep of a process looks at all volumes.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from threefs.csi.errors import AlreadyExists, CsiError, InFlight, InvalidArgument
from threefs.csi.locks import VolumeLocks
from threefs.csi.logs import logger
from threefs.csi.parameters import INLINE, Parameters, quantity_bytes
from threefs.csi.volume_id import VolumeId, directory_name
from threefs.csi.volumes import Volumes
from threefs.errors import NotFound, ThreeFSError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping

    from threefs.csi.directories import Clusters, Directories
    from threefs.csi.holder_client import Holder
    from threefs.csi.metrics import Metrics
    from threefs.csi.volumes import Volume

__all__ = ["InlineVolumes", "is_inline"]

EPHEMERAL = "csi.storage.k8s.io/ephemeral"
SWEEP_SECONDS = 60.0
REMOVE_SECONDS = 2.0
"""For 3FS's answer at a pod's end, which does not wait for longer: the sweep has more time."""
SIZE = "size"
OWN_KEYS = (SIZE,)
LISTS = "/.csi/inline"


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
        self._briefly = clusters.within(REMOVE_SECONDS)
        self._holder = holder
        self._metrics = metrics
        self._default_size_bytes = default_size_bytes
        self._locks = VolumeLocks()
        self._list = f"{LISTS}/{quote(node_id, safe='')}"
        self._unlisted_looked_for: set[str] = set()

    @contextmanager
    def making(self, handle: str, context: Mapping[str, str]) -> Iterator[Volume]:
        """Make the directory of a pod's volume, and keep sweeps from it until this ends."""
        wanted = {name: text for name, text in context.items() if name not in OWN_KEYS}
        parameters = Parameters.parse(wanted)
        size_bytes = self._default_size_bytes
        if SIZE in context:
            size_bytes = quantity_bytes("attribute `size`", context[SIZE])
        volume_id = VolumeId.make(parameters.cluster, parameters.path, handle)
        files = self._clusters.of(parameters.cluster)
        volumes = Volumes(parameters.cluster, files)
        with self._locks.hold(str(volume_id), "NodePublishVolume"):
            found = volumes.find(volume_id)
            if found is None:
                self._enter(files, volume_id)
                extra = {INLINE: self._node_id}
                found = volumes.create(volume_id, handle, size_bytes, parameters, extra)
            elif found.parameters.get(INLINE) != self._node_id:
                raise AlreadyExists(f"`{volume_id}` exists and is no inline volume of this node")
            yield found

    def remove(self, handle: str, was_mounted: str | None) -> None:
        """Remove the directory of a pod's volume: what was mounted for it, else what is listed."""
        try:
            if was_mounted is not None:
                self._remove(VolumeId.parse(was_mounted), self._briefly)
                return
            leaf = directory_name(handle)
            for cluster in self._briefly.names():
                for volume_id in self._listed(self._briefly.of(cluster)):
                    if volume_id.name == leaf:
                        self._remove(volume_id, self._briefly)
        except (CsiError, ThreeFSError) as error:
            self._metrics.ephemeral_left.inc()
            logger().warning("inline volume is removed later", volume_id=handle, error=str(error))

    def sweep(self) -> int:
        """Remove those that no pod of this node has mounted; gives how many."""
        count, failed = 0, None
        for cluster in self._clusters.names():
            # One cluster that is away must not keep the others'.
            try:
                count += self._sweep(cluster)
            except (CsiError, ThreeFSError) as error:
                failed = error
        if failed is not None:
            raise failed
        return count

    def sweep_until(self, stop: threading.Event) -> None:
        """Sweep now and then."""
        while not stop.wait(SWEEP_SECONDS):
            try:
                self.sweep()
            except (CsiError, ThreeFSError) as error:
                logger().warning("sweep of inline volumes", error=str(error))

    def _sweep(self, cluster: str) -> int:
        files = self._clusters.of(cluster)
        if cluster not in self._unlisted_looked_for:
            self._list_old_ones(cluster, files)
            self._unlisted_looked_for.add(cluster)
        count = 0
        for volume_id in self._listed(files):
            # Somebody works on it: the next time.
            with suppress(InFlight), self._locks.hold(str(volume_id), "sweep"):
                table, _ = self._holder.state()
                if not any(one.volume == str(volume_id) for one in table):
                    count += self._remove_held(volume_id, files)
        return count

    def _remove(self, volume_id: VolumeId, clusters: Clusters) -> None:
        with self._locks.hold(str(volume_id), "NodeUnpublishVolume"):
            self._remove_held(volume_id, clusters.of(volume_id.cluster))

    def _remove_held(self, volume_id: VolumeId, files: Directories) -> int:
        """Remove one of this node's and its entry; gives how many there were."""
        volumes = Volumes(volume_id.cluster, files)
        found = volumes.find_readable(volume_id, self._metrics)
        own = found is not None and found.parameters.get(INLINE) == self._node_id
        if own or found is None:
            # Without a record: the rest of a creation that broke off.
            with suppress(AlreadyExists):
                volumes.remove(volume_id)
                self._leave(files, volume_id)
        else:
            self._leave(files, volume_id)
        return int(own)

    def _list_old_ones(self, cluster: str, files: Directories) -> None:
        volumes = Volumes(cluster, files)
        for volume_id in volumes.ids():
            volume = volumes.find_readable(volume_id, self._metrics)
            if volume is not None and volume.parameters.get(INLINE) == self._node_id:
                self._enter(files, volume_id)

    def _listed(self, files: Directories) -> list[VolumeId]:
        found = []
        with suppress(NotFound):
            for name in files.listdir(self._list):
                with suppress(InvalidArgument):
                    found.append(VolumeId.parse(unquote(name)))
        return found

    def _enter(self, files: Directories, volume_id: VolumeId) -> None:
        for path in ("/.csi", LISTS, self._list, self._entry(volume_id)):
            files.make_directory(path, 0o700 if path == self._list else 0o755, exist_ok=True)

    def _leave(self, files: Directories, volume_id: VolumeId) -> None:
        with suppress(NotFound):
            files.rmdir(self._entry(volume_id))

    def _entry(self, volume_id: VolumeId) -> str:
        return f"{self._list}/{quote(str(volume_id), safe='')}"

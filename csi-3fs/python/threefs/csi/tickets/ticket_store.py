"""Ticket store of a node: tickets of the mounted volumes, renewed in time.

A ticket is a credential for one volume's directory. The daemon of a mount reads it from a folder
next to the mount manager's socket, named after the volume::

    tickets/DIGEST/ticket         the credential
    tickets/DIGEST/cluster.json   addresses of the services, time of issue and expiry of the ticket
    tickets/DIGEST/pods.json      the pods that use the volume, by target path

The mount manager sets the folder's group to that of the volume's daemon, and its files, of mode
0640, inherit it. Daemons and clients reload a ticket when its file has changed; a renewal is a
rename.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from threefs.cluster import CLUSTER_FILE, one_or_list, write_atomically
from threefs.csi.errors import (
    CsiError,
    FailedPrecondition,
    Unreachable,
)
from threefs.csi.logs import logger
from threefs.csi.mount_manager.daemon_factory import TICKETS, ticket_folder
from threefs.csi.tickets.review import PODS_MAX, PodName
from threefs.csi.volumes.clusters import Clusters, Rooted
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from threefs.cluster import ClusterFile
    from threefs.csi.metrics import Metrics
    from threefs.csi.tickets.key_issuer import Issued, Issuer
    from threefs.csi.volumes.clusters import Directories
    from threefs.csi.volumes.volume_id import VolumeId

__all__ = ["SHORT_TIMEOUT_SECONDS", "TicketStore"]

TICKET = "ticket"
FILE_MODE = 0o640
PODS_FILE = "pods.json"
POD = tuple(f"csi.storage.k8s.io/pod.{part}" for part in ("namespace", "name", "uid"))
"""Keys of the pod in the context of a publish request (`podInfoOnMount`)."""
SHORT_TIMEOUT_SECONDS = 2.0
"""Timeout of best-effort calls."""


class TicketStore:
    """The tickets of a node's volumes. Callers run one call at a time for a volume."""

    def __init__(
        self,
        folder: Path,
        issuer: Issuer,
        metrics: Metrics,
        timeout_seconds: float,
        connect: Callable[[ClusterFile, float], Directories] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder / TICKETS
        self._issuer = issuer
        self._metrics = metrics
        self._clock = clock
        self._clusters = Clusters(self._folder, timeout_seconds, connect)
        self._short_timeout = self._clusters.within(SHORT_TIMEOUT_SECONDS)

    @property
    def needs_pod(self) -> bool:
        """Whether tickets are issued only for a pod, when the volume is published."""
        return self._issuer.needs_pod

    def issue(self, volume: VolumeId, context: Mapping[str, str]) -> None:
        """Obtain a new ticket for a volume that is about to be mounted."""
        self._obtain(volume, lambda: self._issuer.issue(volume, context))

    def refresh(self, volume: VolumeId, context: Mapping[str, str]) -> None:
        """Obtain a new ticket if half of the present one's lifetime has passed."""
        if self._is_due(volume):
            self._while_valid(volume, lambda: self.issue(volume, context))

    def renew(self, volume: VolumeId) -> None:
        """Renew the ticket of a mounted volume if half of its lifetime has passed."""
        if self._is_due(volume):
            self._while_valid(volume, lambda: self._renew(volume))

    def _renew(self, volume: VolumeId) -> None:
        folder = self._folder / ticket_folder(str(volume))
        try:
            ticket = (folder / TICKET).read_text()
        except OSError as error:
            raise FailedPrecondition(
                f"volume `{volume}` has no ticket to renew; restart its pods"
            ) from error
        pods = list(self._pods(volume).values())[-PODS_MAX:]
        self._obtain(volume, lambda: self._issuer.renew(volume, ticket, pods))

    def _is_due(self, volume: VolumeId) -> bool:
        issued, expires = self._times(volume)
        # Issued in the future: the clock was set back.
        return not issued <= self._clock() < issued + (expires - issued) / 2

    def _while_valid(self, volume: VolumeId, call: Callable[[], None]) -> None:
        """Log a failed renewal while the present ticket is valid; it is retried."""
        try:
            call()
        except (CsiError, ThreeFSError) as error:
            remaining = self._times(volume)[1] - self._clock()
            if remaining <= 0:
                raise
            logger().warning(
                "ticket not renewed",
                volume_id=str(volume),
                error=str(error),
                seconds_left=round(remaining),
            )

    def _obtain(self, volume: VolumeId, call: Callable[[], Issued]) -> None:
        try:
            ticket = call()
        except (CsiError, ThreeFSError):
            self._metrics.tickets.labels("refused").inc()
            raise
        self._metrics.tickets.labels("issued").inc()
        self._write(volume, ticket)

    def add_pod(self, volume: VolumeId, target: str, context: Mapping[str, str]) -> None:
        """Register the pod that uses the volume at a target."""
        pod = [context.get(name, "") for name in POD]
        if all(pod):
            self._write_pods(volume, {**self._raw_pods(volume), target: pod})

    def remove_pod(self, volume: VolumeId, target: str) -> None:
        """Unregister the pod that used the volume at a target."""
        pods = self._raw_pods(volume)
        if pods.pop(target, None) is not None:
            self._write_pods(volume, pods)

    def _pods(self, volume: VolumeId) -> dict[str, PodName]:
        return {target: PodName(*pod) for target, pod in self._raw_pods(volume).items()}

    def _raw_pods(self, volume: VolumeId) -> dict[str, list[str]]:
        try:
            path = self._folder / ticket_folder(str(volume)) / PODS_FILE
            pods: dict[str, list[str]] = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return pods

    def _write_pods(self, volume: VolumeId, pods: dict[str, list[str]]) -> None:
        path = self._folder / ticket_folder(str(volume)) / PODS_FILE
        # Without a folder, no ticket needs renewal.
        with suppress(FileNotFoundError):
            write_atomically(path, json.dumps(pods) + "\n", mode=0o600)

    def files(self, volume: VolumeId, *, short_timeout: bool = False) -> Rooted:
        """Return a client that uses the volume's ticket."""
        name = ticket_folder(str(volume))
        if not (self._folder / name / CLUSTER_FILE).is_file():
            raise Unreachable(f"volume `{volume}` has no ticket on this node; publish it again")
        clusters = self._short_timeout if short_timeout else self._clusters
        return Rooted(clusters.of(name), volume.path)

    def remove(self, volume: VolumeId) -> None:
        """Remove the ticket of an unmounted volume."""
        self._remove(ticket_folder(str(volume)))

    def remove_expired(self, mounted: Collection[str]) -> None:
        """Remove expired tickets of volumes that are not mounted."""
        in_use = {ticket_folder(volume) for volume in mounted}
        for name in self._clusters.names():
            _, expires = self._times_of(name)
            if name not in in_use and expires <= self._clock():
                self._remove(name)

    def _write(self, volume: VolumeId, ticket: Issued) -> None:
        folder = self._folder / ticket_folder(str(volume))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / TICKET, ticket.ticket, mode=FILE_MODE)
        # Last: daemons and later calls look for this file.
        data = {
            "version": 1,
            "mgmtd": list(ticket.mgmtd),
            "meta": one_or_list(ticket.meta),
            "tls": ticket.tls,
            "key_file": TICKET,
            "volume": str(volume),
            "issued": self._clock(),
            "expires": ticket.expires_unix_s,
        }
        write_atomically(folder / CLUSTER_FILE, json.dumps(data) + "\n", mode=FILE_MODE)

    def _remove(self, name: str) -> None:
        self._clusters.drop(name)
        self._short_timeout.drop(name)
        with suppress(FileNotFoundError):
            (self._folder / name / CLUSTER_FILE).unlink()
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _times(self, volume: VolumeId) -> tuple[float, float]:
        return self._times_of(ticket_folder(str(volume)))

    def _times_of(self, name: str) -> tuple[float, float]:
        """Return the time of issue and the expiry of a ticket; zeros if there is none."""
        try:
            data: Any = json.loads((self._folder / name / CLUSTER_FILE).read_text())
            return float(data["issued"]), float(data["expires"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0, 0.0

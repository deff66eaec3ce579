"""Tickets of mounted volumes on a node: asked for, kept for the daemons, renewed, removed.

A ticket is a credential for one volume's directory. The daemon of a mount finds it in a folder
beside the holder's socket, named after the volume::

    tickets/DIGEST/ticket         what services accept
    tickets/DIGEST/cluster.json   where these listen, and when the ticket was issued and ends
    tickets/DIGEST/pods.json      the pods that it is for, by the place where each has the volume

The holder gives the folder the group of the volume's daemon, which its files inherit: the mode is
0640. Daemons and clients read a ticket again when its file has changed, so a renewal is a rename.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from threefs import _native
from threefs.cluster import CLUSTER_FILE, write_atomically
from threefs.csi.directories import Clusters, Rooted
from threefs.csi.errors import (
    CsiError,
    FailedPrecondition,
    Missing,
    NoPermission,
    Unreachable,
)
from threefs.csi.holder.daemons import TICKETS, ticket_folder
from threefs.csi.issuer.review import PODS_MAX, PodName
from threefs.csi.logs import logger
from threefs.csi.settings import TICKET_SECONDS
from threefs.csi.volumes import Volumes
from threefs.errors import InvalidArgument as InvalidArgument3FS
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from threefs.cluster import ClusterFile
    from threefs.csi.directories import Directories
    from threefs.csi.metrics import Metrics
    from threefs.csi.volume_id import VolumeId

__all__ = ["BRIEFLY_SECONDS", "Issued", "Issuer", "KeyIssuer", "Tickets"]

Ticket = tuple[str, int, str, bool, str, int]
"""Cluster, directory's inode, path, read-only, node, expiry: as `_native.read_ticket` gives it."""
TICKET = "ticket"
FILE_MODE = 0o640
PODS_FILE = "pods.json"
POD = tuple(f"csi.storage.k8s.io/pod.{part}" for part in ("namespace", "name", "uid"))
"""Where the kubelet names the pod in a publish request (`podInfoOnMount`)."""
CLUSTER_NAME = "default"
"""Services know their cluster by this name."""
BRIEFLY_SECONDS = 2.0
"""For calls that are not worth waiting for."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A ticket, when it ends, and where the services listen."""

    ticket: str
    expires_unix_s: int
    mgmtd: tuple[str, ...]
    meta: str
    tls: bool = False

    def __repr__(self) -> str:
        return f"Issued(expires_unix_s={self.expires_unix_s}, meta={self.meta!r})"


@dataclass(frozen=True, slots=True)
class Held:
    """What a ticket that is to be renewed is for."""

    directory: int
    node: str


class Issuer(Protocol):
    """Who issues tickets."""

    @property
    def needs_pod(self) -> bool:
        """Whether it wants the token of a pod, which is known when a volume is published."""

    def issue(self, volume: VolumeId, context: Mapping[str, str]) -> Issued:
        """A ticket for a volume; `context` is the volume context of the publish request."""

    def renew(self, volume: VolumeId, ticket: str, pods: Sequence[PodName]) -> Issued:
        """A ticket in place of one for the same volume, which these pods use."""


class KeyIssuer:
    """Issues tickets with the cluster's key, to whoever asks: the caller decides who that is."""

    needs_pod = False

    def __init__(
        self,
        clusters: Clusters,
        node: str = "",
        seconds: float = TICKET_SECONDS,
        seal: Callable[..., str] = _native.issue_ticket,
        unseal: Callable[[str, str], Ticket] = _native.verify_ticket,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clusters = clusters
        self._node = node
        self._seconds = seconds
        self._seal = seal
        self._unseal = unseal
        self._clock = clock

    def issue(self, volume: VolumeId, context: Mapping[str, str]) -> Issued:  # noqa: ARG002
        """See `Issuer`."""
        return self.issue_for(volume, self._node)

    def renew(
        self,
        volume: VolumeId,
        ticket: str,
        pods: Sequence[PodName],  # noqa: ARG002
    ) -> Issued:
        """See `Issuer`."""
        held = self.verify(volume, ticket)
        return self.issue_for(volume, self._node, directory=held.directory)

    def verify(self, volume: VolumeId, ticket: str) -> Held:
        """What a ticket is for, if it was made here, expired or not."""
        file = self._clusters.file(volume.cluster)
        try:
            _, directory, _, _, node, _ = self._unseal(file.key_file, ticket)
        except InvalidArgument3FS as error:
            raise NoPermission(f"the ticket cannot be renewed: {error}") from error
        return Held(directory, node)

    def issue_for(
        self,
        volume: VolumeId,
        node: str,
        *,
        read_only: bool = False,
        directory: int | None = None,
    ) -> Issued:
        """A ticket for the inode of a volume's directory, which must have the driver's record.

        To renew one, the inode must be that of the ticket: a volume that was made again under the
        same name is another one.
        """
        files = self._clusters.of(volume.cluster)
        file = self._clusters.file(volume.cluster)
        volumes = Volumes(volume.cluster, files)
        if volumes.find(volume) is None:
            raise Missing(f"volume `{volume}` does not exist: it was deleted, or never made")
        found = files.stat(volume.path)
        if directory not in (None, found.inode):
            raise FailedPrecondition(
                f"volume `{volume}` was deleted and made again, or the ticket is for another one"
            )
        if not found.is_dir or volumes.usage(volume) is None:
            raise FailedPrecondition(
                f"`{volume.path}` in 3FS is no directory with a quota, and the quota marks what is "
                "within a ticket; set its quota again, or restore the volume"
            )
        expires = int(self._clock() + self._seconds)
        text = self._seal(
            file.key_file,
            cluster=CLUSTER_NAME,
            directory=found.inode,
            path=volume.path,
            read_only=read_only,
            node=node,
            expires_unix_s=expires,
        )
        return Issued(text, expires, file.mgmtd, file.meta, file.tls)


class Tickets:
    """The tickets of a node's volumes. Its callers let one call at a time to a volume."""

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
        self._briefly = self._clusters.within(BRIEFLY_SECONDS)

    @property
    def needs_pod(self) -> bool:
        """Whether a ticket can be had only for a pod, when the volume is published."""
        return self._issuer.needs_pod

    def issue(self, volume: VolumeId, context: Mapping[str, str]) -> None:
        """Have a new ticket, for a volume that is about to be mounted."""
        self._have(volume, lambda: self._issuer.issue(volume, context))

    def refresh(self, volume: VolumeId, context: Mapping[str, str]) -> None:
        """As `issue`, where the ticket that is there has less than half of its time left."""
        if self._is_due(volume):
            self._or_go_on(volume, lambda: self.issue(volume, context))

    def renew(self, volume: VolumeId) -> None:
        """Renew the ticket of a mounted volume when half of its time has passed."""
        if self._is_due(volume):
            self._or_go_on(volume, lambda: self._renew(volume))

    def _renew(self, volume: VolumeId) -> None:
        folder = self._folder / ticket_folder(str(volume))
        try:
            ticket = (folder / TICKET).read_text()
        except OSError as error:
            raise FailedPrecondition(
                f"volume `{volume}` has no ticket that can be renewed; start its pods again"
            ) from error
        pods = list(self._pods(volume).values())[-PODS_MAX:]
        self._have(volume, lambda: self._issuer.renew(volume, ticket, pods))

    def _is_due(self, volume: VolumeId) -> bool:
        issued, expires = self._times(volume)
        # A ticket from the future: the clock was set back.
        return not issued <= self._clock() < issued + (expires - issued) / 2

    def _or_go_on(self, volume: VolumeId, call: Callable[[], None]) -> None:
        """Log that a ticket was not renewed while it is valid: it is asked for again."""
        try:
            call()
        except (CsiError, ThreeFSError) as error:
            left = self._times(volume)[1] - self._clock()
            if left <= 0:
                raise
            logger().warning(
                "ticket not renewed",
                volume_id=str(volume),
                error=str(error),
                seconds_left=round(left),
            )

    def _have(self, volume: VolumeId, call: Callable[[], Issued]) -> None:
        try:
            fresh = call()
        except (CsiError, ThreeFSError):
            self._metrics.tickets.labels("refused").inc()
            raise
        self._metrics.tickets.labels("issued").inc()
        self._write(volume, fresh)

    def use(self, volume: VolumeId, target: str, context: Mapping[str, str]) -> None:
        """Remember which pod has the volume at a place."""
        pod = [context.get(name, "") for name in POD]
        if all(pod):
            self._write_pods(volume, {**self._raw_pods(volume), target: pod})

    def end_use(self, volume: VolumeId, target: str) -> None:
        """The pod does not have it at that place any more."""
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
        # Without a folder there is no ticket to renew.
        with suppress(FileNotFoundError):
            write_atomically(path, json.dumps(pods) + "\n", mode=0o600)

    def files(self, volume: VolumeId, *, briefly: bool = False) -> Rooted:
        """What the volume's ticket reaches."""
        name = ticket_folder(str(volume))
        if not (self._folder / name / CLUSTER_FILE).is_file():
            raise Unreachable(f"volume `{volume}` has no ticket on this node; publish it again")
        clusters = self._briefly if briefly else self._clusters
        return Rooted(clusters.of(name), volume.path)

    def forget(self, volume: VolumeId) -> None:
        """Remove the ticket of a volume that is not mounted here any more."""
        self._remove(ticket_folder(str(volume)))

    def forget_expired(self, mounted: Collection[str]) -> None:
        """Remove tickets that have ended, of volumes that are not mounted here."""
        kept = {ticket_folder(volume) for volume in mounted}
        for name in self._clusters.names():
            _, expires = self._times_of(name)
            if name not in kept and expires <= self._clock():
                self._remove(name)

    def _write(self, volume: VolumeId, fresh: Issued) -> None:
        folder = self._folder / ticket_folder(str(volume))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / TICKET, fresh.ticket, mode=FILE_MODE)
        # Last: without it the daemon and the next call see no ticket.
        data = {
            "version": 1,
            "mgmtd": list(fresh.mgmtd),
            "meta": fresh.meta,
            "tls": fresh.tls,
            "key_file": TICKET,
            "volume": str(volume),
            "issued": self._clock(),
            "expires": fresh.expires_unix_s,
        }
        write_atomically(folder / CLUSTER_FILE, json.dumps(data) + "\n", mode=FILE_MODE)

    def _remove(self, name: str) -> None:
        self._clusters.drop(name)
        self._briefly.drop(name)
        with suppress(FileNotFoundError):
            (self._folder / name / CLUSTER_FILE).unlink()
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _times(self, volume: VolumeId) -> tuple[float, float]:
        return self._times_of(ticket_folder(str(volume)))

    def _times_of(self, name: str) -> tuple[float, float]:
        """When a ticket was issued and when it ends; zeroes when there is none."""
        try:
            data: Any = json.loads((self._folder / name / CLUSTER_FILE).read_text())
            return float(data["issued"]), float(data["expires"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0, 0.0

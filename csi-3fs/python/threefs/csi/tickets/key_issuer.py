"""Issuing of tickets: the interface, and an issuer that has the cluster's key."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from threefs import _native
from threefs.csi.errors import FailedPrecondition, Missing, NoPermission
from threefs.csi.settings import TICKET_SECONDS
from threefs.csi.volumes.volumes import Volumes
from threefs.errors import InvalidArgument as InvalidArgument3FS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from threefs.csi.tickets.review import PodName
    from threefs.csi.volumes.clusters import Clusters
    from threefs.csi.volumes.volume_id import VolumeId

__all__ = ["Issued", "Issuer", "KeyIssuer", "TicketInfo"]

Ticket = tuple[str, int, str, bool, str, int]
"""Cluster, directory's inode, path, read-only, node, expiry: as `_native.read_ticket` returns
it."""
CLUSTER_NAME = "default"
"""The name of the cluster in its services' configuration."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A ticket, its expiry, and the addresses of the services."""

    ticket: str
    expires_unix_s: int
    mgmtd: tuple[str, ...]
    meta: tuple[str, ...]
    tls: bool = False

    def __repr__(self) -> str:
        return f"Issued(expires_unix_s={self.expires_unix_s}, meta={self.meta!r})"


@dataclass(frozen=True, slots=True)
class TicketInfo:
    """Directory and node of a ticket to renew."""

    directory: int
    node: str


class Issuer(Protocol):
    """Interface of ticket issuers."""

    @property
    def needs_pod(self) -> bool:
        """Whether it requires the token of a pod, which is available when a volume is published."""

    def issue(self, volume: VolumeId, context: Mapping[str, str]) -> Issued:
        """Issue a ticket; `context` is the volume context of the publish request."""

    def renew(self, volume: VolumeId, ticket: str, pods: Sequence[PodName]) -> Issued:
        """Issue a ticket that replaces one for the same volume, which these pods use."""


class KeyIssuer:
    """Issues tickets with the cluster's key to any caller; authorization is the caller's task."""

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
        info = self.verify(volume, ticket)
        return self.issue_for(volume, self._node, directory=info.directory)

    def verify(self, volume: VolumeId, ticket: str) -> TicketInfo:
        """Verify a ticket of this cluster, expired or not."""
        file = self._clusters.file(volume.cluster)
        try:
            _, directory, _, _, node, _ = self._unseal(file.key_file, ticket)
        except InvalidArgument3FS as error:
            raise NoPermission(f"the ticket cannot be renewed: {error}") from error
        return TicketInfo(directory, node)

    def issue_for(
        self,
        volume: VolumeId,
        node: str,
        *,
        read_only: bool = False,
        directory: int | None = None,
    ) -> Issued:
        """Issue a ticket for the inode of a volume's directory, which must have a record.

        For a renewal, the inode must match the ticket: a volume that was recreated with the same
        name is another volume.
        """
        files = self._clusters.of(volume.cluster)
        file = self._clusters.file(volume.cluster)
        volumes = Volumes(volume.cluster, files)
        if volumes.find(volume) is None:
            raise Missing(f"volume `{volume}` does not exist: it was deleted, or never created")
        stat = files.stat(volume.path)
        if directory not in (None, stat.inode):
            raise FailedPrecondition(
                f"volume `{volume}` was deleted and recreated, or the ticket is for another volume"
            )
        if not stat.is_dir or volumes.usage(volume) is None:
            raise FailedPrecondition(
                f"`{volume.path}` in 3FS is not a directory with a quota, and the quota marks "
                "the scope of a ticket; set its quota again, or restore the volume"
            )
        expires = int(self._clock() + self._seconds)
        text = self._seal(
            file.key_file,
            cluster=CLUSTER_NAME,
            directory=stat.inode,
            path=volume.path,
            read_only=read_only,
            node=node,
            expires_unix_s=expires,
        )
        return Issued(text, expires, file.mgmtd, file.meta, file.tls)

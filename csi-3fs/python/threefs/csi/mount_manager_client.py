"""Client of the mount manager's socket, for the node service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from threefs.csi.errors import (
    AlreadyExists,
    CsiError,
    DirtyMount,
    FailedPrecondition,
    InFlight,
    InvalidArgument,
    Unreachable,
)
from threefs.csi.mount_manager.protocol import Refused, exchange
from threefs.csi.mount_manager.read_bytes import DISTANCES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["MountManager", "MountManagerClient", "MountPoint", "MountStatus", "UnmountResult"]

CALL_SECONDS = 25.0
"""Longer than the longest call of the mount manager."""
QUERY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One path at which a volume is mounted on this node."""

    volume: str
    target: str
    device: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class MountStatus:
    """Status of a managed mount and of its daemon."""

    volume: str
    target: str
    device: str
    state: str
    pid: int
    restarts: int
    since: float
    message: str


@dataclass(frozen=True, slots=True)
class UnmountResult:
    """Result of an unmount."""

    volume: str | None
    clean: bool
    """False if requests in progress were not waited for."""
    data_lost: str = ""
    """Why written data may be lost; empty if none is."""
    unverified: bool = False
    """True if the mount was synced, but it is unknown whether all requests were answered."""

    @property
    def result(self) -> str:
        """`clean`, `unverified`, `detached` or `data_lost`."""
        if self.data_lost:
            return "data_lost"
        if not self.clean:
            return "detached"
        return "unverified" if self.unverified else "clean"


class MountManager(Protocol):
    """The requests of the node service."""

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> None:
        """Mount and serve; idempotent. With `node`, under that node's claim."""

    def bind(self, source: str, target: str, *, read_only: bool, flags: Sequence[str]) -> None:
        """Bind-mount a mount at a second target; idempotent."""

    def unmount(self, target: str) -> UnmountResult:
        """Unmount a target."""

    def state(self) -> tuple[list[MountPoint], list[MountStatus]]:
        """Return the mount points of this driver on the node, and the managed mounts."""

    def read_bytes(self) -> dict[str, list[int]]:
        """Return the bytes that each mount has read, by its device, in order of `DISTANCES`."""


class MountManagerClient:
    """Sends requests to the manager at a socket, each over a new connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> None:
        """See `MountManager`."""
        self._call(
            CALL_SECONDS,
            op="mount",
            volume=volume,
            cluster=cluster,
            root=root,
            target=target,
            read_only=read_only,
            node=node,
        )

    def bind(self, source: str, target: str, *, read_only: bool, flags: Sequence[str]) -> None:
        """See `MountManager`."""
        self._call(
            CALL_SECONDS,
            op="bind",
            source=source,
            target=target,
            read_only=read_only,
            flags=list(flags),
        )

    def unmount(self, target: str) -> UnmountResult:
        """See `MountManager`."""
        reply = self._call(CALL_SECONDS, op="unmount", target=target)
        result = reply["result"]
        return UnmountResult(
            reply["volume"],
            clean=result != "detached",
            data_lost=str(reply["data_lost"]),
            unverified=result == "unverified",
        )

    def state(self) -> tuple[list[MountPoint], list[MountStatus]]:
        """See `MountManager`."""
        reply = self._call(QUERY_SECONDS, op="list")
        return (
            [MountPoint(**entry) for entry in reply["mount_points"]],
            [MountStatus(**mount) for mount in reply["mounts"]],
        )

    def read_bytes(self) -> dict[str, list[int]]:
        """See `MountManager`; empty from a manager of an earlier release."""
        reads: dict[str, list[int]] = self._call(QUERY_SECONDS, op="list").get("read_bytes", {})
        # A manager of a later release may know more distances.
        return {device: read for device, read in reads.items() if len(read) == len(DISTANCES)}

    def hello(self) -> dict[str, Any]:
        """Return the state of the manager."""
        return self._call(QUERY_SECONDS, op="hello")

    def _call(self, seconds: float, **request: object) -> dict[str, Any]:
        try:
            reply = exchange(self._path, seconds, **request)
        except (OSError, Refused) as error:
            raise Unreachable(
                f"the mount manager at `{self._path}` does not reply ({error}); check its pod "
                "on this node. Existing mounts are not affected"
            ) from error
        if reply.get("ok") is True:
            return reply
        message = str(reply.get("message"))
        raise ERRORS.get(str(reply.get("kind")), CsiError)(message)


ERRORS: dict[str, type[CsiError]] = {
    "invalid": InvalidArgument,
    "conflict": AlreadyExists,
    "busy": FailedPrecondition,
    "again": InFlight,
    "dirty": DirtyMount,
}

"""The node service's side of the holder's socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from threefs.csi.errors import (
    AlreadyExists,
    CsiError,
    FailedPrecondition,
    InFlight,
    InvalidArgument,
    Unreachable,
    Unwritten,
)
from threefs.csi.holder.protocol import Refused, receive, send

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Holder", "HolderClient", "MountedAt", "Served", "Undone"]

CALL_SECONDS = 25.0
"""Longer than the longest that the holder takes for one call."""
ASK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class MountedAt:
    """One place where a volume is mounted on this node."""

    volume: str
    target: str
    device: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Served:
    """A mount that the holder keeps, and how its daemon is."""

    volume: str
    target: str
    device: str
    state: str
    pid: int
    restarts: int
    since: float
    message: str


@dataclass(frozen=True, slots=True)
class Undone:
    """What was at a place, and how it ended."""

    volume: str | None
    clean: bool
    """False if something was under way that was not waited for."""
    unwritten: str = ""
    """Why the holder believes that written data did not reach 3FS, and is lost."""
    unseen: bool = False
    """True if nothing could be seen of what was under way; it was synced before."""

    @property
    def how(self) -> str:
        """`clean`, `unseen`, `detached` or `unwritten`."""
        if self.unwritten:
            return "unwritten"
        if not self.clean:
            return "detached"
        return "unseen" if self.unseen else "clean"


class Holder(Protocol):
    """What the node service asks of the holder."""

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> None:
        """Mount and serve; done already is no error. With `node`, under that node's claim."""

    def bind(self, source: str, target: str, *, read_only: bool, flags: Sequence[str]) -> None:
        """Show a mount at a second place; done already is no error."""

    def unmount(self, target: str) -> Undone:
        """Undo what is at a place."""

    def state(self) -> tuple[list[MountedAt], list[Served]]:
        """All mounts of this driver on the node, and those that are held."""


class HolderClient:
    """Asks the holder at a socket; each call is a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> None:
        """See `Holder`."""
        self._ask(
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
        """See `Holder`."""
        self._ask(
            CALL_SECONDS,
            op="bind",
            source=source,
            target=target,
            read_only=read_only,
            flags=list(flags),
        )

    def unmount(self, target: str) -> Undone:
        """See `Holder`."""
        answer = self._ask(CALL_SECONDS, op="unmount", target=target)
        # A holder of a version before says nothing of what was not written.
        unwritten = str(answer.get("unwritten", ""))
        how = answer["how"]
        return Undone(answer["was"], how != "detached", unwritten, unseen=how == "unseen")

    def state(self) -> tuple[list[MountedAt], list[Served]]:
        """See `Holder`."""
        answer = self._ask(ASK_SECONDS, op="list")
        return (
            [MountedAt(**line) for line in answer["mounts"]],
            [Served(**line) for line in answer["held"]],
        )

    def hello(self) -> dict[str, Any]:
        """Whether it is there."""
        return self._ask(ASK_SECONDS, op="hello")

    def _ask(self, seconds: float, **request: object) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            try:
                connection.connect(str(self._path))
                send(connection, request)
                answer = receive(connection)
            except (OSError, Refused) as error:
                raise Unreachable(
                    f"the holder at `{self._path}` does not answer ({error}); look at its pod on "
                    "this node: mounts go on without this call"
                ) from error
        if answer.get("ok") is True:
            return answer
        message = str(answer.get("message"))
        raise ERRORS.get(str(answer.get("kind")), CsiError)(message)


ERRORS: dict[str, type[CsiError]] = {
    "invalid": InvalidArgument,
    "conflict": AlreadyExists,
    "busy": FailedPrecondition,
    "again": InFlight,
    "unwritten": Unwritten,
}

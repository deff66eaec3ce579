"""Protocol of the mount manager's socket: one request and one reply a connection, as JSON lines.

Requests over the UNIX stream, with their fields::

    hello                                           -> protocol, pid, mounts (count), draining
    mount    volume cluster root target read_only [node] -> already_mounted
    bind     source target read_only flags          -> already_mounted
    unmount  target                                 -> volume (or null), result, data_lost
    list                                            -> mount_points, mounts, read_bytes
    handover                                        -> mounts
    send     (after handover)                       -> a descriptor for each mount
    received (after send)

A reply has `ok`: true, or false with `kind` (of `KINDS`) and `message`. Only root may connect: the
socket's mode is 0600 and the peer's user is checked.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "KINDS",
    "LINE_BYTES_MAX",
    "PROTOCOL",
    "Refused",
    "connect",
    "exchange",
    "listen",
    "receive",
    "receive_descriptors",
    "send",
    "send_descriptors",
]

PROTOCOL = 1
LINE_BYTES_MAX = 1 << 20
"""A reply lists every mount of a node; a request is far smaller."""


@contextlib.contextmanager
def _socket_address(path: Path) -> Iterator[str]:
    """An address of the socket `path` that fits the 108 bytes of unix(7), however long the path is.

    Raises OSError where the folder cannot be opened.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path, backlog: int) -> socket.socket:
    """Listen at the socket `path`, in place of any process that listened there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # No client may connect before the mode is set.
    old_umask = os.umask(0o177)
    try:
        with _socket_address(temporary) as address:
            listener.bind(address)
    finally:
        os.umask(old_umask)
    listener.listen(backlog)
    temporary.replace(path)
    return listener


def connect(path: Path, seconds: float) -> socket.socket:
    """Connect to the socket `path`; this and each later step end within `seconds`.

    Raises OSError where no process serves the socket in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    try:
        with _socket_address(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def exchange(path: Path, seconds: float, **request: object) -> dict[str, Any]:
    """Send one request to the socket `path` and return its reply, each step within `seconds`.

    Raises OSError where no process serves the socket in time, Refused for an invalid reply.
    """
    with connect(path, seconds) as connection:
        send(connection, request)
        return receive(connection)


KINDS = ("invalid", "conflict", "busy", "failed", "again", "dirty")
"""invalid: the request is wrong. conflict: the target is used for something else. busy: the mount
is still in use. failed: an operation failed. again: another call is in progress, or another mount
manager takes over. dirty: data of the mount is not in 3FS yet; it stays mounted, retry."""

DESCRIPTORS_PER_MESSAGE = 128
"""The kernel accepts 253 in one message."""


class Refused(Exception):  # noqa: N818 -- it is a reply
    """A request that was not executed, with the reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive one line; a peer that sends none, or too long a one, is refused."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise Refused("invalid", "the connection ended in the middle of a line")
        line += part
        if len(line) > LINE_BYTES_MAX:
            raise Refused("invalid", f"a line is longer than {LINE_BYTES_MAX} bytes")
    try:
        message = json.loads(line)
    except ValueError as error:
        raise Refused("invalid", f"a line is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise Refused("invalid", "a message must be an object")
    return message


def send_descriptors(connection: socket.socket, descriptors: list[int]) -> None:
    """Send descriptors, a bounded number in each message."""
    for first in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
        some = array.array("i", descriptors[first : first + DESCRIPTORS_PER_MESSAGE])
        connection.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)])


def receive_descriptors(connection: socket.socket, count: int) -> list[int]:
    """Receive `count` descriptors; all are closed if fewer or more arrive."""
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(DESCRIPTORS_PER_MESSAGE * descriptors.itemsize)
    complete = False
    try:
        while len(descriptors) < count:
            data, ancillary, _, _ = connection.recvmsg(1, space)
            for level, kind, some in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(some[: len(some) - len(some) % descriptors.itemsize])
            if not data:
                break
        complete = len(descriptors) == count
    finally:
        if not complete:
            for descriptor in descriptors:
                os.close(descriptor)
    if not complete:
        raise Refused("failed", f"{len(descriptors)} of {count} descriptors arrived")
    return list(descriptors)

"""The holder's socket: a UNIX stream, one request and one answer a connection, a JSON line each.

Requests, with the fields that each takes::

    hello                                           -> protocol, pid, held, leaving
    mount    volume cluster root target read_only [node] -> already
    bind     source target read_only flags          -> already
    unmount  target                                 -> was (volume or null), how, unwritten
    list                                            -> mounts, held
    handover                                        -> held
    give     (after that)                           -> a descriptor for each
    taken    (after those)

An answer has `ok`: true, or false with `kind` (of `KINDS`) and `message`. Only root may connect:
the socket's mode is 0600 and the peer's user is checked.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

__all__ = [
    "KINDS",
    "LINE_BYTES_MAX",
    "PROTOCOL",
    "Refused",
    "receive",
    "receive_descriptors",
    "send",
    "send_descriptors",
]

PROTOCOL = 1
LINE_BYTES_MAX = 1 << 20
"""An answer lists every mount of a node; a request is far smaller."""

KINDS = ("invalid", "conflict", "busy", "failed", "again", "unwritten")
"""invalid: the request is wrong. conflict: something else is there. busy: still in use. failed: it
was tried. again: another call is under way, or another holder takes over.
unwritten: data of the mount is not in 3FS yet, so it stays; asked again it may be."""

DESCRIPTORS_A_MESSAGE = 128
"""The kernel takes 253 in one message."""


class Refused(Exception):  # noqa: N818 -- it is an answer
    """What the holder did not do, and why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any]:
    """Receive one line; a peer that says nothing or too much is refused."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise Refused("invalid", "the connection ended before a line did")
        line += part
        if len(line) > LINE_BYTES_MAX:
            raise Refused("invalid", f"a line is longer than {LINE_BYTES_MAX} bytes")
    try:
        message = json.loads(line)
    except ValueError as error:
        raise Refused("invalid", f"a line is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise Refused("invalid", "a message must be an object")
    return message


def send_descriptors(connection: socket.socket, descriptors: list[int]) -> None:
    """Send descriptors, a bounded number a message."""
    for first in range(0, len(descriptors), DESCRIPTORS_A_MESSAGE):
        some = array.array("i", descriptors[first : first + DESCRIPTORS_A_MESSAGE])
        connection.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)])


def receive_descriptors(connection: socket.socket, count: int) -> list[int]:
    """Receive so many descriptors; none is left open if they do not arrive as they should."""
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(DESCRIPTORS_A_MESSAGE * descriptors.itemsize)
    complete = False
    try:
        while len(descriptors) < count:
            data, ancillary, _, _ = connection.recvmsg(1, room)
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

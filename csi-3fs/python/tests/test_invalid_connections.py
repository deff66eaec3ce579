"""Garbage, oversized frames and wrong keys at every port are refused without side effects."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import socket
import struct
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import threefs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVICES = ["mgmtd", "meta", "storage-1", "storage-2", "storage-3"]
GARBAGE = random.Random(3).randbytes(4096)
HEADER = struct.Struct("<4sBBHQIIII")


def dial(cluster: Any, service: str) -> socket.socket:
    host, port = cluster.status_file()["services"][service].rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=60)


def authenticated(cluster: Any, service: str) -> socket.socket:
    """A connection after the handshake of `fabric::handshake`, by a holder of the key."""
    connection = dial(cluster, service)
    key = bytes((cluster.folder / "key").read_bytes().strip())
    context = f"threefs/{service.partition('-')[0]}"
    nonce = os.urandom(32)
    hello = b"FFAUTH02" + nonce + bytes(8)
    connection.sendall(hello)
    peer_nonce = receive(connection, 64)[:32]
    secret = mac(key, b"derive", b"service", b"")
    connection.sendall(mac(secret, b"dialer", context.encode(), b"", hello, peer_nonce))
    assert receive(connection, 1) == b"\x06"
    return connection


def mac(key: bytes, *parts: bytes) -> bytes:
    signed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(key, signed, hashlib.sha256).digest()


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def frame(message: bytes, *, message_bytes: int | None = None, payload_bytes: int = 0) -> bytes:
    length = len(message) if message_bytes is None else message_bytes
    header = HEADER.pack(b"FFR1", 1, 1, 0, 7, length, payload_bytes, 1000, threefs.crc32c(message))
    return header + threefs.crc32c(header).to_bytes(4, "little") + message


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextmanager
def undisturbed(cluster: Any) -> Iterator[None]:
    """Check that an open file and every process are unaffected."""
    pids = {service: cluster.pid(service) for service in SERVICES}
    with cluster.client() as client:
        client.write_file("/undisturbed", b"before")
        yield
        client.write_file("/undisturbed", b"after")
        assert client.read_file("/undisturbed") == b"after"
    assert pids == {service: cluster.pid(service) for service in SERVICES}


def test_every_service_is_covered(cluster: Any) -> None:
    assert sorted(cluster.status_file()["services"]) == sorted(SERVICES)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    "bad",
    [b"GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: anything\r\n\r\n", GARBAGE],
    ids=["http", "garbage"],
)
def test_garbage_instead_of_a_handshake_closes_the_connection(
    cluster: Any, service: str, bad: bytes
) -> None:
    with undisturbed(cluster), dial(cluster, service) as connection:
        connection.sendall(bad)
        assert is_closed(connection)


@pytest.mark.parametrize("service", SERVICES)
def test_a_truncated_frame_affects_no_other_connection(cluster: Any, service: str) -> None:
    with undisturbed(cluster), authenticated(cluster, service) as connection:
        connection.sendall(frame(b"", message_bytes=1000) + b"half of it")
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    "bad",
    [
        GARBAGE,
        frame(b"", message_bytes=(1 << 32) - 1),
        frame(b"", payload_bytes=(1 << 32) - 1),
        frame(b"message")[:-1] + b"?",
        frame(b"message")[:32] + b"????",
    ],
    ids=[
        "garbage",
        "huge message",
        "huge payload",
        "wrong checksum",
        "wrong checksum of the header",
    ],
)
def test_a_bad_frame_closes_its_connection_only(cluster: Any, service: str, bad: bytes) -> None:
    with undisturbed(cluster), authenticated(cluster, service) as connection:
        connection.sendall(bad)
        assert is_closed(connection)


@pytest.mark.parametrize("service", SERVICES)
def test_an_unknown_message_is_refused_and_the_connection_stays(cluster: Any, service: str) -> None:
    with undisturbed(cluster), authenticated(cluster, service) as connection:
        for _ in range(2):
            connection.sendall(frame(b"\xff" * 50))
            header = HEADER.unpack(receive(connection, 36)[:32])
            fault = 3
            assert (header[0], header[2], header[4]) == (b"FFR1", fault, 7)
            receive(connection, header[5] + header[6])


def test_a_wrong_key_is_refused_and_reported(cluster: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "key"
    wrong.write_text("0123456789abcdef0123456789abcdef")
    text = cluster.file.read_text().replace(str(cluster.folder / "key"), str(wrong))
    (tmp_path / "cluster.json").write_text(text)
    with (
        undisturbed(cluster),
        threefs.connect(tmp_path, timeout_seconds=60) as client,
    ):
        with pytest.raises(threefs.PermissionDenied, match="another key"):
            client.listdir("/")
        with pytest.raises(threefs.PermissionDenied, match="another key"):
            client.status()


def test_only_the_owner_can_read_the_key(cluster: Any) -> None:
    assert (cluster.folder / "key").stat().st_mode & 0o777 == 0o600
    for log in (cluster.folder / "logs").iterdir():
        assert (cluster.folder / "key").read_text().strip() not in log.read_text()


@pytest.mark.parametrize(("connections", "addresses"), [(160, 1), (4096, 23)])
@pytest.mark.parametrize("service", SERVICES)
def test_silent_connections_do_not_block_members(
    cluster: Any, service: str, connections: int, addresses: int
) -> None:
    """More connections than a service has slots; members connect and work meanwhile."""
    host, port = cluster.status_file()["services"][service].rsplit(":", 1)
    with undisturbed(cluster), ExitStack() as stack:
        for number in range(connections):
            source = (f"127.0.9.{1 + number % addresses}", 0)
            silent = socket.create_connection((host, int(port)), 60, source_address=source)
            stack.enter_context(silent)
            if number % (connections // 4) == 0:
                with cluster.client() as client:
                    client.write_file(f"/member-{number}", b"written meanwhile")
                    assert client.read_file(f"/member-{number}") == b"written meanwhile"
        with authenticated(cluster, service) as connection:
            connection.sendall(frame(b"\xff" * 50))
            assert receive(connection, 4) == b"FFR1"

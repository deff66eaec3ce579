"""Exec probes of the kubelet: liveness and readiness of the service in this pod.

Live means that the local port answers (of mgmtd, that it answers a status call); the state of the
rest of the cluster is not a reason to restart the pod. Ready means that clients can connect.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from threefs.errors import InvalidArgument, ThreeFSError, Unavailable
from threefs.nodes import node_name
from threefs.services.settings import META_PORT, MGMTD_PORT, STORAGE_PORT, addresses_of

if TYPE_CHECKING:
    from pathlib import Path

    from threefs._native import Client

__all__ = ["probe"]

PORTS = {"mgmtd": MGMTD_PORT, "meta": META_PORT, "storage": STORAGE_PORT}
HEARTBEAT_AGE_MS_MAX = 10_000


def probe(
    kind: str,
    listen: str,
    key_file: Path,
    mgmtd: str,
    node: int,
    *,
    ready: bool,
    timeout_seconds: float,
    tls: bool = False,
) -> None:
    """Return if the probe succeeds; raise otherwise."""
    if kind not in PORTS:
        raise InvalidArgument(f"kind is `{kind}`; it must be {', '.join(PORTS)}")
    host, _, port = (listen or f"127.0.0.1:{PORTS[kind]}").rpartition(":")
    local = f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else f"{host}:{port}"  # noqa: S104
    _check_port(kind, local, timeout_seconds)
    if kind == "mgmtd":
        _status([local], local, key_file, timeout_seconds, tls=tls)
    elif kind == "meta" and ready:
        client = _client(addresses_of("mgmtd", mgmtd), local, key_file, timeout_seconds, tls=tls)
        client.stat("/", True)
    elif kind == "storage" and ready:
        addresses = addresses_of("mgmtd", mgmtd)
        _check_heartbeat(node, _status(addresses, local, key_file, timeout_seconds, tls=tls))


def _check_port(kind: str, address: str, timeout_seconds: float) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()
    except OSError as error:
        raise Unavailable(f"{kind} does not listen on {address}: {error}", who=kind) from error


def _client(
    mgmtd: list[str], meta: str, key_file: Path, timeout_seconds: float, *, tls: bool
) -> Client:
    from threefs import _native

    return _native.Client(mgmtd, meta, str(key_file), timeout_seconds, tls=tls)


def _status(
    mgmtd: list[str], meta: str, key_file: Path, timeout_seconds: float, *, tls: bool
) -> dict[str, Any]:
    client = _client(mgmtd, meta, key_file, timeout_seconds, tls=tls)
    status: dict[str, Any] = json.loads(client.status())
    return status


def _check_heartbeat(node: int, status: dict[str, Any]) -> None:
    for line in status["cluster"]["nodes"]:
        if line["node"] == node:
            if line["alive"] and (line["heartbeat_age_ms"] or 0) < HEARTBEAT_AGE_MS_MAX:
                return
            raise ThreeFSError(f"mgmtd counts {node_name(node)} as dead; see the log of this pod")
    raise ThreeFSError(f"mgmtd does not know {node_name(node)} yet")

"""Exec probes of the kubelet: liveness and readiness of the service in this pod.

Live means that the local port answers (of mgmtd, that it answers a status call); the state of the
rest of the cluster is not a reason to restart the pod. Ready means that clients can connect.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from threefs.errors import InvalidArgument, ThreeFSError, Unavailable
from threefs.nodes import node_name, service_of
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
        _check_heartbeats(node, _status(addresses, local, key_file, timeout_seconds, tls=tls))


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


def _check_heartbeats(service: int, status: dict[str, Any]) -> None:
    """Whether mgmtd gets heartbeats of the service's disks.

    A lost disk keeps the service unready as long as it has replicas, so that no other service is
    restarted or evicted meanwhile.
    """
    nodes = {
        line["node"]: bool(line["alive"]) and (line["heartbeat_age_ms"] or 0) < HEARTBEAT_AGE_MS_MAX
        for line in status["cluster"]["nodes"]
        if service_of(line["node"]) == service
    }
    if not nodes:
        raise ThreeFSError(f"mgmtd does not know {node_name(service)} yet")
    chains = status["routing"]["chains"].values()
    used = {place["node"] for chain in chains for place in chain["targets"]}
    dead = sorted(node for node, alive in nodes.items() if not alive and node in used)
    if not dead and not any(nodes.values()):
        dead = sorted(nodes)
    if dead:
        names = ", ".join(map(node_name, dead))
        raise ThreeFSError(
            f"mgmtd counts {names} as dead; see the log of this pod. If a disk is lost, replace "
            "it, or empty its node with `threefs drain`"
        )

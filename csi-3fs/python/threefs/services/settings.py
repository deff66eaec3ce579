"""Configuration of the native services, built from a container's settings and validated. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from threefs.errors import InvalidArgument
from threefs.nodes import DISK_MAX, SERVICE_MAX
from threefs.shared_store import NO_SHARED_STORE, SHARED_STORES, SharedStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = [
    "META_PORT",
    "MGMTD_PORT",
    "SCRUB_INTERVAL_HOURS",
    "STORAGE_PORT",
    "addresses_of",
    "meta_config",
    "mgmtd_config",
    "node_id_of",
    "storage_config",
    "tls_config",
]

MGMTD_PORT, META_PORT, STORAGE_PORT = 9000, 9001, 9002

STRIPE = 64
"""Number of chains over which a file is striped; a smaller table is used as a whole."""

GC_DELAY_MS = 10_000
"""Retention of a removed file's chunks: readers that have it open can still finish."""

DRAIN_MS = 2_000
"""Time for which a terminating storage node waits for mgmtd to redirect its clients."""

SCRUB_INTERVAL_HOURS = 7 * 24
"""Time from the start of one scrub of a target to the start of the next."""

SCRUB_RATE_BYTES = 32 << 20
"""Bytes that the scrubs of a disk read per second: 20 TB in a week."""

PRIMARY_LEASE_MS_MIN = 4000
"""Time for which mgmtd answers without its store: an election of etcd is shorter."""

ADDRESS = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.]{0,252}):([0-9]{1,5})|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")


def mgmtd_config(
    *,
    listen: str,
    advertise: str,
    data: Path | None,
    key_file: Path,
    storage_nodes: int,
    replicas: int,
    chains_per_node: int,
    node_failure_ms: int,
    rebalance: bool = True,
    shared: SharedStore = NO_SHARED_STORE,
) -> dict[str, Any]:
    """Configuration of mgmtd; with fewer storage nodes than replicas each node holds one copy."""
    for name, value in (
        ("storage-nodes", storage_nodes),
        ("replicas", replicas),
        ("chains-per-node", chains_per_node),
    ):
        _at_least(name, value, 1)
    _at_least("node-failure-ms", node_failure_ms, 100)
    return {
        **_listens(listen, advertise),
        **_store("mgmtd", data, shared),
        "key_file": str(key_file),
        "nodes": storage_nodes,
        "replicas": min(replicas, storage_nodes),
        "chains_per_node": chains_per_node,
        "node_failure_ms": node_failure_ms,
        "rebalance": rebalance,
        "primary_lease_ms": max(node_failure_ms, PRIMARY_LEASE_MS_MIN),
        "scan_ms": max(20, node_failure_ms // 20),
    }


def meta_config(
    *,
    listen: str,
    data: Path | None,
    key_file: Path,
    mgmtd: str,
    chunk_bytes: int,
    shared: SharedStore = NO_SHARED_STORE,
) -> dict[str, Any]:
    """Configuration of the metadata service."""
    if chunk_bytes & (chunk_bytes - 1) or not 1 << 16 <= chunk_bytes <= 1 << 26:
        raise _wrong("chunk-size", chunk_bytes, "a power of two from 64 KiB to 64 MiB")
    return {
        "listen": _address("listen", listen),
        **_store("meta", data, shared),
        "key_file": str(key_file),
        "mgmtd": addresses_of("mgmtd", mgmtd),
        "chunk_bytes": chunk_bytes,
        "stripe": STRIPE,
        "gc_delay_ms": GC_DELAY_MS,
    }


def storage_config(
    *,
    listen: str,
    advertise: str,
    data: Path,
    key_file: Path,
    mgmtd: str,
    node_id: int,
    capacity_bytes: int,
    node_failure_ms: int,
    disks: Sequence[Path] = (),
    location: str = "",
    scrub_interval_hours: int = SCRUB_INTERVAL_HOURS,
    scrub_rate_bytes: int = SCRUB_RATE_BYTES,
) -> dict[str, Any]:
    """Configuration of a storage service; `disks` are the folders of its further disks."""
    if not 1 <= node_id <= SERVICE_MAX:
        raise _wrong("node-id", node_id, f"from 1 to {SERVICE_MAX}")
    _at_least("capacity", capacity_bytes, 0)
    _at_least("scrub-interval-hours", scrub_interval_hours, 0)
    _at_least("scrub-rate", scrub_rate_bytes, 1 << 20)
    return {
        **_listens(listen, advertise),
        "data": str(data / "storage"),
        **_disks(data, disks),
        "key_file": str(key_file),
        "mgmtd": addresses_of("mgmtd", mgmtd),
        "node_id": node_id,
        "location": location,
        "capacity_bytes": capacity_bytes,
        "call_timeout_ms": max(200, node_failure_ms // 5),
        "drain_ms": DRAIN_MS,
        "scrub_interval_s": scrub_interval_hours * 3600,
        "scrub_bytes_per_second": scrub_rate_bytes,
    }


def tls_config(*, enabled: bool, transition: bool) -> dict[str, Any]:
    """TLS settings, which are the same for each service."""
    return {"tls": enabled, "tls_transition": transition}


def node_id_of(pod_name: str) -> int:
    """The ordinal at the end of a StatefulSet's pod name, plus 1: node ids start at 1."""
    match = re.fullmatch(r".*-([0-9]{1,5})", pod_name.partition(".")[0])
    if match is None:
        raise InvalidArgument(
            f"pod name `{pod_name}` does not end in an ordinal such as storage-0; run storage "
            "services as a StatefulSet, or set --node-id"
        )
    return int(match[1]) + 1


def addresses_of(name: str, text: str) -> list[str]:
    """Split addresses at commas and validate each."""
    return [_address(name, part.strip()) for part in text.split(",")]


def _store(service: str, data: Path | None, shared: SharedStore) -> dict[str, Any]:
    """The shared store, or the folder, that a service keeps its rows in."""
    config = shared.config(service)
    if config is not None:
        return config
    if data is None:
        raise _wrong("data", "", f"a folder on a separate volume, unless {SHARED_STORES} is given")
    return {"data": str(data / service)}


def _disks(data: Path, disks: Sequence[Path]) -> dict[str, Any]:
    """The folders of the further disks; a service with one disk has no such setting."""
    if len(disks) > DISK_MAX:
        raise _wrong("disk", f"{len(disks)} folders", f"given at most {DISK_MAX} times", "disks")
    folders = [data, *disks]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise _wrong("disk", folder, "given once, and another folder than --data", "disks")
    return {"disks": [str(folder / "storage") for folder in disks]} if disks else {}


def _listens(listen: str, advertise: str) -> dict[str, Any]:
    addresses: dict[str, Any] = {"listen": _address("listen", listen)}
    if advertise:
        addresses["advertise"] = _address("advertise", advertise)
    elif listen.startswith(("0.0.0.0:", "[::]:")):
        raise _wrong("advertise", advertise, f"given, because --listen is {listen}")
    return addresses


def _address(name: str, text: str) -> str:
    if not ADDRESS.fullmatch(text) or not 0 < int(text.rpartition(":")[2]) < 1 << 16:
        raise _wrong(name, text, "host:port, such as threefs-mgmtd-0.threefs-mgmtd:9000")
    return text


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise _wrong(name, value, f"at least {least}")


def _wrong(name: str, value: object, expected: str, variable: str = "") -> InvalidArgument:
    variable = "THREEFS_" + (variable or name).upper().replace("-", "_")
    return InvalidArgument(f"--{name} ({variable}) is `{value}`; it must be {expected}")

"""Plan of a single-node cluster: its services and their configurations. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from threefs.supervisor.options import ServeOptions

__all__ = [
    "Service",
    "disk_folders",
    "meta_names",
    "mgmtd_names",
    "numbered",
    "service_names",
    "services",
]


STRIPE = 64
"""Number of chains over which a file is striped: more than one machine has, so all."""
DEAD_GRACE_MS = 1000
"""Time from when a removed file is unreadable until its chunks are deleted."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process."""

    name: str
    kind: str
    address: str
    config: dict[str, Any]


def service_names(options: ServeOptions) -> list[str]:
    """Names in the order in which they start."""
    storage = (f"storage-{node}" for node in range(1, options.storage + 1))
    return [*mgmtd_names(options), *meta_names(options), *storage]


def mgmtd_names(options: ServeOptions) -> list[str]:
    """Names of the mgmtds: `mgmtd`, `mgmtd-2`, …."""
    return numbered("mgmtd", options.mgmtds)


def meta_names(options: ServeOptions) -> list[str]:
    """Names of the metadata services: `meta`, `meta-2`, …."""
    return numbered("meta", options.metas)


def numbered(kind: str, count: int) -> list[str]:
    """Names of the services of a kind."""
    # The first one has the name that it has alone, so that more can be added to a folder.
    return [kind, *(f"{kind}-{number}" for number in range(2, count + 1))]


def disk_folders(options: ServeOptions, service: int) -> list[str]:
    """Names of the folders of a storage service's disks; that of the first is the service's."""
    first = f"storage-{service}"
    return [first, *(f"{first}.{disk}" for disk in range(1, options.disks))]


def services(
    options: ServeOptions, addresses: dict[str, str], key_file: Path, data: Path
) -> list[Service]:
    """Every service with its configuration."""
    mgmtd = [addresses[name] for name in mgmtd_names(options)]
    shared: dict[str, Any] = {"key_file": str(key_file), "tls": options.tls}
    configs: dict[str, dict[str, Any]] = {}
    for name in mgmtd_names(options):
        configs[name] = {
            "nodes": options.storage,
            "replicas": options.replicas,
            "chains_per_node": options.chains_per_node,
            "node_failure_ms": options.node_failure_ms,
            "primary_lease_ms": 3 * options.node_failure_ms,
            "scan_ms": options.scan_ms,
        }
    for name in meta_names(options):
        configs[name] = {
            "mgmtd": mgmtd,
            "chunk_bytes": options.chunk_bytes,
            "stripe": STRIPE,
            "gc_delay_ms": options.gc_delay_ms,
            "dead_grace_ms": DEAD_GRACE_MS,
        }
    for node in range(1, options.storage + 1):
        configs[f"storage-{node}"] = {
            "mgmtd": mgmtd,
            "node_id": node,
            "capacity_bytes": options.capacity_bytes,
            "call_timeout_ms": max(200, options.node_failure_ms),
        }
        if further := disk_folders(options, node)[1:]:
            configs[f"storage-{node}"]["disks"] = [str(data / name) for name in further]
    stores: dict[str, Any] = {name: {"data": str(data / name)} for name in configs}
    for kind, names in (("mgmtd", mgmtd_names(options)), ("meta", meta_names(options))):
        if store := options.store(kind):
            stores.update(dict.fromkeys(names, store))
    return [
        Service(
            name=name,
            kind=name.partition("-")[0],
            address=addresses[name],
            config={
                "listen": addresses[name],
                **stores[name],
                **shared,
                **configs[name],
            },
        )
        for name in service_names(options)
    ]

"""Ids and names of storage nodes. A node of mgmtd is a disk of a storage service.

Disk k of service s has the id ``k * 1000000 + s`` and the name `node-s.k`; the first disk, which is
disk 0, has the id and number of its service and the name `node-s`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "DISK_MAX",
    "SERVICE_MAX",
    "node_label",
    "node_name",
    "node_of",
    "nodes_named",
    "service_of",
]

SERVICE_MAX = 999_999
DISK_MAX = 255
"""Highest number of a disk in its service."""

_SERVICES = SERVICE_MAX + 1
_NODE_NAME = re.compile(r"(?:node-)?([0-9]{1,9})|node-([0-9]{1,6})\.([0-9]{1,3})")
_SERVICE_NAME = re.compile(r"service-([0-9]{1,6})")


def node_of(service: int, disk: int) -> int:
    """The id of a disk of a service."""
    return disk * _SERVICES + service


def service_of(node: int) -> int:
    """The service of a node, which is the id of its first disk."""
    return node % _SERVICES


def node_label(node: int) -> str:
    """The number of a node in labels of metrics: 3, or 3.2 for disk 2 of service 3."""
    disk, service = divmod(node, _SERVICES)
    return f"{service}.{disk}" if disk else str(service)


def node_name(node: int) -> str:
    """The name of a node, as commands, findings and logs print it."""
    return f"node-{node_label(node)}"


def nodes_named(name: str, known: Collection[int]) -> set[int] | None:
    """Which nodes a name denotes; None if it is not a name of nodes, or an id.

    `service-3` denotes all disks of a service. A disk is not denoted by `3.2` alone, because a rack
    or zone may be called so.
    """
    if match := _SERVICE_NAME.fullmatch(name):
        return {node for node in known if service_of(node) == int(match[1])}
    match = _NODE_NAME.fullmatch(name)
    if match is None:
        return None
    node, service, disk = match.groups()
    return {int(node) if node is not None else node_of(int(service), int(disk))} & set(known)

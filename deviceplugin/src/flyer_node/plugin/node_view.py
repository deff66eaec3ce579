"""Snapshot of a node's inventory and health, from which device lists are derived. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer_node.inventory import Inventory

__all__ = ["NodeView"]


@dataclass(frozen=True)
class NodeView:
    """Inventory and health, the input of all resources."""

    inventory: Inventory
    bad_gpus: frozenset[str] = frozenset()
    bad_pairs: frozenset[str] = frozenset()
    bad_ports: frozenset[str] = frozenset()
    device_mode: str = "nodes"
    """`nodes`: character devices; `cdi`: names for the runtime's CDI. Never both."""
    cdi_error: str = ""
    """Why the specifications of mode `cdi` could not be written."""
    nvidia_cdi: frozenset[str] = frozenset()
    """GPUs in NVIDIA's CDI specification, which also mounts the driver's libraries."""
    device_root: str = "/dev"
    slots: int = 64
    """Maximum number of containers that share a port, for each traffic class."""
    topology_file: str = ""
    """NCCL's topology file on the host; empty if it could not be written."""
    exists: Callable[[str], bool] = field(default=lambda _: True, compare=False)
    """Whether a device node exists."""

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
    """Inventory and health as the resources see them."""

    inventory: Inventory
    bad_gpus: frozenset[str] = frozenset()
    bad_pairs: frozenset[str] = frozenset()
    bad_ports: frozenset[str] = frozenset()
    device_mode: str = "nodes"
    """`nodes`: character devices; `cdi`: names for the runtime's CDI. Never both."""
    cdi_error: str = ""
    """Why the specifications of mode `cdi` could not be written."""
    nvidia_cdi: frozenset[str] = frozenset()
    """GPUs that NVIDIA's own CDI specification names: with it come the driver's libraries."""
    device_root: str = "/dev"
    slots: int = 64
    """Containers that may share one port, a traffic class each counts for itself."""
    topology_file: str = ""
    """NCCL's topology file on the host; empty if it could not be written."""
    exists: Callable[[str], bool] = field(default=lambda _: True, compare=False)
    """Whether a device node is there."""

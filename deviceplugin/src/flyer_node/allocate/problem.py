"""The allocator's view of a node: GPUs as bits, what connects them as masks.

Built once per inventory and per change of health; choosing only does integer arithmetic on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from flyer_node.inventory import Inventory, PciDevice

__all__ = ["FAR", "Board", "board_of", "nic_distance"]

FAR = 4
"""Distance to the nearest HCA when there is none, or when nobody knows where it is."""


@dataclass(frozen=True, slots=True)
class Board:
    """GPUs in NVML's order; bit i of every mask is `gpus[i]`."""

    gpus: tuple[str, ...]
    pairs: tuple[int, ...]
    """One mask of two bits per healthy NVLink bridge."""
    numa: tuple[int, ...]
    """One mask per NUMA node that has GPUs; GPUs of unknown place form one of their own."""
    roots: tuple[int, ...]
    """One mask per root complex that more than one GPU shares."""
    distances: tuple[int, ...]
    """Of each GPU to its nearest HCA, 0 (same switch) to `FAR`."""

    def mask(self, gpus: Collection[str]) -> int:
        """The bits of these GPUs; KeyError names one that the board lacks."""
        places = {uuid: 1 << index for index, uuid in enumerate(self.gpus)}
        total = 0
        for uuid in gpus:
            total |= places[uuid]
        return total

    def names(self, mask: int) -> tuple[str, ...]:
        """The GPUs of these bits, in the board's order."""
        return tuple(uuid for index, uuid in enumerate(self.gpus) if mask >> index & 1)


def board_of(inventory: Inventory, broken_bridges: Collection[str] = ()) -> Board:
    """The board of a node; GPUs over a bridge named in `broken_bridges` count as unbridged."""
    gpus = sorted(inventory.gpus, key=lambda gpu: gpu.index)
    bit = {gpu.uuid: 1 << place for place, gpu in enumerate(gpus)}
    numa: dict[int | None, int] = {}
    roots: dict[str, int] = {}
    for gpu in gpus:
        device = inventory.pci_by_address.get(gpu.address)
        node = device.numa_node if device else None
        numa[node] = numa.get(node, 0) | bit[gpu.uuid]
        if device:
            roots[device.root_complex] = roots.get(device.root_complex, 0) | bit[gpu.uuid]
    return Board(
        gpus=tuple(gpu.uuid for gpu in gpus),
        pairs=tuple(
            bit[bridge.first] | bit[bridge.second]
            for bridge in inventory.bridges
            if bridge.id not in broken_bridges
        ),
        numa=tuple(numa.values()),
        roots=tuple(mask for mask in roots.values() if mask.bit_count() > 1),
        distances=tuple(_nearest(inventory, gpu.address) for gpu in gpus),
    )


def nic_distance(gpu: PciDevice, nic: PciDevice) -> int:
    """How far a GPU is from a NIC: 0 below one switch, 1 root complex, 2 NUMA node, 3 the other."""
    if gpu.upstream and nic.upstream and gpu.upstream[0] == nic.upstream[0]:
        return 0
    if gpu.root_complex == nic.root_complex:
        return 1
    if gpu.numa_node is None or nic.numa_node is None:
        return FAR
    return 2 if gpu.numa_node == nic.numa_node else 3


def _nearest(inventory: Inventory, address: str) -> int:
    gpu = inventory.pci_by_address.get(address)
    nics = [inventory.pci_by_address.get(hca.address or "") for hca in inventory.hcas]
    return min((nic_distance(gpu, nic) for nic in nics if gpu and nic), default=FAR)

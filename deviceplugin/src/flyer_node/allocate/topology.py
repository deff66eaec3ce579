"""GPU topology of a node as bit masks, the input of the allocator.

Built once per change of inventory or health; the allocator only does integer arithmetic on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from flyer_node.inventory import Inventory, PciDevice

__all__ = ["FAR", "GpuTopology", "gpu_topology", "nic_distance"]

FAR = 4
"""Distance to the nearest HCA if there is none or its place is unknown."""


@dataclass(frozen=True, slots=True)
class GpuTopology:
    """GPUs in NVML's order; bit i of every mask is `gpus[i]`."""

    gpus: tuple[str, ...]
    pairs: tuple[int, ...]
    """One mask of two bits per healthy NVLink bridge."""
    numa: tuple[int, ...]
    """One mask per NUMA node that has GPUs; GPUs without a known node share a separate one."""
    roots: tuple[int, ...]
    """One mask per root complex that more than one GPU shares."""
    distances: tuple[int, ...]
    """Distance of each GPU to its nearest HCA, 0 (same switch) to `FAR`."""

    def mask(self, gpus: Collection[str]) -> int:
        """The bits of these GPUs; KeyError names an unknown one."""
        places = {uuid: 1 << index for index, uuid in enumerate(self.gpus)}
        total = 0
        for uuid in gpus:
            total |= places[uuid]
        return total

    def names(self, mask: int) -> tuple[str, ...]:
        """The GPUs of these bits, in topology order."""
        return tuple(uuid for index, uuid in enumerate(self.gpus) if mask >> index & 1)


def gpu_topology(inventory: Inventory, broken_bridges: Collection[str] = ()) -> GpuTopology:
    """The topology of a node; bridges in `broken_bridges` are ignored."""
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
    return GpuTopology(
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
    """Distance of GPU and NIC: 0 same switch, 1 same root complex, 2 same NUMA node, 3 other."""
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

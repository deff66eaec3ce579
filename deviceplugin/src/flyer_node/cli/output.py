"""Text output of the inventory: a list of devices and the PCIe tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer_node.inventory.pci import is_gpu

if TYPE_CHECKING:
    from flyer_node.inventory import Inventory

__all__ = ["listing", "tree"]

GIB = 1 << 30


def listing(inventory: Inventory) -> str:
    """GPUs and HCAs, one per line."""
    lines = [f"node {inventory.node}, driver {inventory.driver_version or 'none'}"]
    for gpu in inventory.gpus:
        bridge = inventory.bridge_of.get(gpu.uuid)
        pair = ""
        if bridge is not None:
            other = bridge.second if bridge.first == gpu.uuid else bridge.first
            pair = f", {bridge.links} links to GPU {inventory.gpus_by_uuid[other].index}"
        numa = inventory.numa_of_gpu(gpu.uuid)
        memory = f"{gpu.memory_bytes / GIB:.0f} GiB"
        place = f"{gpu.address}, NUMA {'?' if numa is None else numa}"
        lines.append(f"GPU {gpu.index}  {gpu.uuid}  {gpu.name}, {memory}, {place}{pair}")
    for hca in inventory.hcas:
        ports = ", ".join(
            f"port {port.number} {port.link_layer.value} {port.state} {port.rate_gbps:g} Gb/s"
            for port in hca.ports
        )
        lines.append(f"HCA {hca.name}  {hca.address or 'software'}, {hca.verbs_device}, {ports}")
    lines += [
        f"finding: {item.kind.value} {item.where}: {item.detail}" for item in inventory.findings
    ]
    return "\n".join(lines)


def tree(inventory: Inventory) -> str:
    """The PCIe tree: NUMA nodes, root complexes and their GPUs and HCAs."""
    gpus = {gpu.address: gpu for gpu in inventory.gpus}
    hcas = {hca.address: hca for hca in inventory.hcas}
    devices = [item for item in inventory.pci if item.address in gpus or item.address in hcas]
    lines = [f"node {inventory.node}"]
    numa_ids: list[int | None] = [None, *(node.id for node in inventory.numa_nodes)]
    for numa in numa_ids:
        local = [device for device in devices if device.numa_node == numa]
        if not local and numa is None:
            continue
        lines.append(f"  NUMA {'unknown' if numa is None else numa}")
        for root in sorted({device.root_complex for device in local}):
            below = [device for device in local if device.root_complex == root]
            shared = " (shared: about 37.5 GB/s to the CPU in total)" if len(below) > 1 else ""
            lines.append(f"    {root}{shared}")
            for device in below:
                address, link = device.address, device.link
                name = f"GPU {gpus[address].index}" if is_gpu(device) else hcas[address].name
                speed = f"{link.gigatransfers:g} GT/s x{link.lanes}" if link else ""
                lines.append(f"      {address}  {name}  {speed}")
    for bridge in inventory.bridges:
        first, second = (
            inventory.gpus_by_uuid[uuid].index for uuid in (bridge.first, bridge.second)
        )
        lines.append(f"  pair GPU {first} = GPU {second}, {bridge.links} NVLink links")
    return "\n".join(lines)

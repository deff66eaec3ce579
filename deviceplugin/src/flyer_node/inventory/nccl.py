"""NCCL's topology file from the inventory.

NCCL reads it through NCCL_TOPO_FILE, adds the devices that it detects and drops those that the
process cannot see. The file has what only the node knows: the root complex and NUMA node of each
device, with link speeds. It omits GPU indices and ranks, which differ between containers, and
NVLink, which NCCL queries from the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from flyer_node.inventory.pci import is_gpu

if TYPE_CHECKING:
    from flyer_node.inventory.model import Inventory, Link, NumaNode, PciDevice

__all__ = ["nccl_topology"]

VERSION = "1"
"""Version of NCCL's format (NCCL_TOPO_XML_VERSION)."""


def nccl_topology(inventory: Inventory) -> str:
    """The file's text. GPUs and HCAs whose NUMA node is unknown hang below the first one."""
    system = ET.Element("system", version=VERSION)
    devices = [device for device in inventory.pci if is_gpu(device)]
    adapters = [inventory.pci_by_address.get(hca.address or "") for hca in inventory.hcas]
    devices += [device for device in adapters if device is not None and device not in devices]
    nodes = inventory.numa_nodes
    first = nodes[0].id if nodes else 0
    for number in sorted(
        {first if device.numa_node is None else device.numa_node for device in devices}
    ):
        cpu = ET.SubElement(system, "cpu", numaid=str(number), affinity=_affinity(nodes, number))
        below = [
            device
            for device in devices
            if (first if device.numa_node is None else device.numa_node) == number
        ]
        _add(cpu, inventory, sorted(below, key=lambda device: device.address))
    ET.indent(system)
    return ET.tostring(system, encoding="unicode") + "\n"


def _add(cpu: ET.Element, inventory: Inventory, devices: list[PciDevice]) -> None:
    """Hangs devices below the bridges that several of them share; a lone bridge is left out."""
    elements: dict[tuple[str, ...], ET.Element] = {}
    for device in devices:
        parent = cpu
        for depth in range(len(device.upstream)):
            path = device.upstream[: depth + 1]
            sharers = [item for item in devices if item.upstream[: depth + 1] == path]
            bridge = inventory.pci_by_address.get(path[-1])
            if len(sharers) < 2 or bridge is None:
                continue
            if path not in elements:
                elements[path] = ET.SubElement(parent, "pci", _attributes(bridge))
            parent = elements[path]
        ET.SubElement(parent, "pci", _attributes(device))


def _attributes(device: PciDevice) -> dict[str, str]:
    return {
        "busid": device.address,
        "class": f"0x{device.class_code:06x}",
        "vendor": f"0x{device.vendor:04x}",
        "device": f"0x{device.device:04x}",
        "subsystem_vendor": f"0x{device.subsystem_vendor:04x}",
        "subsystem_device": f"0x{device.subsystem_device:04x}",
        **_link(device.link_max or device.link),
    }


def _link(link: Link | None) -> dict[str, str]:
    if link is None:
        return {}
    return {"link_speed": f"{link.gigatransfers:.1f} GT/s PCIe", "link_width": str(link.lanes)}


def _affinity(nodes: tuple[NumaNode, ...], number: int) -> str:
    """The NUMA node's processors as the kernel's comma-separated words of 32 bits."""
    cpus = next((node.cpus for node in nodes if node.id == number), ())
    mask = sum(1 << cpu for cpu in cpus)
    words = [
        f"{mask >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(mask.bit_length(), 1), 32)
    ]
    return ",".join(reversed(words))

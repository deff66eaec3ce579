"""The PCIe tree from sysfs: GPUs, network adapters, and the bridges above them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from flyer_node.inventory.model import FindingKind, Link, NumaNode, PciDevice

if TYPE_CHECKING:
    from flyer_node.inventory.tree import SysfsTree

__all__ = ["NVIDIA", "is_gpu", "normal_address", "parse_cpus", "read_numa", "read_pci"]

NVIDIA = 0x10DE
DISPLAY, NETWORK = 0x03, 0x02
CPUS_MAX = 8192
"""The kernel's own bound (CONFIG_NR_CPUS of distributions)."""

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s")


def normal_address(address: str) -> str:
    """The kernel's spelling of a PCI address: drivers write 00000000:01:00.0 for 0000:01:00.0."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{rest}"


def is_gpu(device: PciDevice) -> bool:
    """Whether it is an NVIDIA display or 3D controller."""
    return device.vendor == NVIDIA and device.class_code >> 16 == DISPLAY


def read_pci(tree: SysfsTree) -> tuple[PciDevice, ...]:
    """GPUs and network adapters with the bridges that lead to them."""
    folder = "bus/pci/devices"
    devices: dict[str, PciDevice] = {}
    for address in tree.names(folder, optional=False):
        if not _ADDRESS.fullmatch(address):
            tree.found(FindingKind.MALFORMED, f"{folder}/{address}", "not a PCI address")
            continue
        real = tree.resolve(f"{folder}/{address}")
        if real is None:
            continue
        class_code = tree.number(f"{folder}/{address}/class", base=16, high=0xFFFFFF)
        if class_code is None or class_code >> 16 not in (DISPLAY, NETWORK):
            continue
        device = _read_device(tree, address, real, class_code)
        if device is None:
            continue
        devices[address] = device
        for depth, bridge in enumerate(device.upstream):
            if bridge not in devices:
                _add_bridge(tree, devices, device, depth)
    return tuple(devices[address] for address in sorted(devices))


def _add_bridge(
    tree: SysfsTree, devices: dict[str, PciDevice], below: PciDevice, depth: int
) -> None:
    address = below.upstream[depth]
    real = tree.resolve(f"bus/pci/devices/{address}")
    class_code = tree.number(f"bus/pci/devices/{address}/class", base=16, high=0xFFFFFF)
    bridge = _read_device(tree, address, real, class_code or 0x060400) if real else None
    if bridge is not None:
        devices[address] = bridge


def _read_device(tree: SysfsTree, address: str, real: str, class_code: int) -> PciDevice | None:
    folder = f"bus/pci/devices/{address}"
    parts = real.split("/")
    root = next((place for place, part in enumerate(parts) if _ROOT.fullmatch(part)), None)
    if root is None or parts[-1] != address:
        tree.found(FindingKind.CONFLICT, folder, f"leads to {real}, which is not this device")
        return None
    upstream = tuple(parts[root + 1 : -1])
    if any(not _ADDRESS.fullmatch(item) for item in upstream) or address in upstream:
        tree.found(FindingKind.LOOP, folder, f"odd place in the tree: {real}")
        return None

    def identifier(name: str) -> int:
        return tree.number(f"{folder}/{name}", base=16, high=0xFFFF) or 0

    return PciDevice(
        address=address,
        root_complex=parts[root],
        upstream=upstream,
        class_code=class_code,
        vendor=identifier("vendor"),
        device=identifier("device"),
        subsystem_vendor=identifier("subsystem_vendor"),
        subsystem_device=identifier("subsystem_device"),
        numa_node=tree.numa_node(folder),
        link=_read_link(tree, folder, "current"),
        link_max=_read_link(tree, folder, "max"),
    )


def _read_link(tree: SysfsTree, folder: str, prefix: str) -> Link | None:
    speed_path = f"{folder}/{prefix}_link_speed"
    speed = tree.text(speed_path, optional=True)
    lanes = tree.number(f"{folder}/{prefix}_link_width", high=64, optional=True)
    if speed is None or lanes is None or speed.startswith("Unknown"):
        return None
    match = _SPEED.match(speed)
    if match is None:
        tree.found(FindingKind.MALFORMED, speed_path, f"not a speed: {speed[:60]!r}")
        return None
    return Link(float(match[1]), lanes)


def read_numa(tree: SysfsTree) -> tuple[NumaNode, ...]:
    """The machine's NUMA nodes."""
    folder = "devices/system/node"
    nodes = []
    for name in tree.names(folder, optional=False):
        number = name.removeprefix("node")
        if not name.startswith("node") or not number.isdecimal():
            continue
        path = f"{folder}/{name}/cpulist"
        cpus = parse_cpus(tree.text(path) or "")
        if cpus is None:
            tree.found(FindingKind.MALFORMED, path, "not a list of processors")
        nodes.append(NumaNode(int(number), cpus or ()))
    return tuple(sorted(nodes, key=lambda node: node.id))


def parse_cpus(text: str) -> tuple[int, ...] | None:
    """The kernel's list format: 0-3,8. None if it is not one."""
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return None
        low, high = int(first), int(last or first)
        if not low <= high < CPUS_MAX:
            return None
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))

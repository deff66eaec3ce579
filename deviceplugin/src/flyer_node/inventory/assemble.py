"""Builds an inventory from sysfs and from the driver's data.

Where they disagree, the inventory keeps what both confirm and reports the rest as a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer_node.inventory.hca import read_hcas
from flyer_node.inventory.model import (
    Bridge,
    Finding,
    FindingKind,
    Gpu,
    Hca,
    Inventory,
    NumaNode,
    PciDevice,
)
from flyer_node.inventory.pci import is_gpu, read_numa, read_pci
from flyer_node.inventory.tree import SysfsTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["DriverFacts", "DriverGpu", "SysfsFacts", "assemble", "read_sysfs"]

DEVICE_ID_MAX = 63
"""Characters of a device's id, by the kubelet's interface."""


@dataclass(frozen=True, slots=True)
class SysfsFacts:
    """The part read from the kernel."""

    numa_nodes: tuple[NumaNode, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    hcas: tuple[Hca, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """A GPU as the driver describes it, with the PCI addresses at its NVLink links' far ends."""

    gpu: Gpu
    link_peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The part read from the driver."""

    driver_version: str = ""
    gpus: tuple[DriverGpu, ...] = ()
    findings: tuple[Finding, ...] = ()


def read_sysfs(root: Path) -> SysfsFacts:
    """Reads the whole tree below `root`; blocks as long as the firmware does."""
    tree = SysfsTree(root)
    numa, pci, hcas = read_numa(tree), read_pci(tree), read_hcas(tree)
    return SysfsFacts(numa, pci, hcas, tuple(tree.findings))


def assemble(
    node: str,
    sysfs: SysfsFacts,
    driver: DriverFacts,
    *,
    boot_id: str = "",
    known_bridges: Sequence[Bridge] = (),
) -> Inventory:
    """One inventory; a bridge in `known_bridges` is kept though its links may be down now."""
    findings = [*sysfs.findings, *driver.findings]
    gpus = _sound_gpus(driver.gpus, findings)
    addresses = {item.gpu.address for item in driver.gpus}
    in_tree = {device.address for device in sysfs.pci}
    findings += [
        Finding(FindingKind.DRIVER, device.address, "a GPU that the driver does not list")
        for device in sysfs.pci
        if is_gpu(device) and device.address not in addresses
    ]
    findings += [
        Finding(FindingKind.CONFLICT, item.gpu.address, f"{item.gpu.uuid} is not on the PCIe tree")
        for item in gpus
        if item.gpu.address not in in_tree
    ]
    bridges = _bridges(gpus, findings)
    present = {item.gpu.uuid for item in gpus}
    bridged = {uuid for bridge in bridges for uuid in (bridge.first, bridge.second)}
    bridges += [
        bridge
        for bridge in known_bridges
        if {bridge.first, bridge.second} <= present and not {bridge.first, bridge.second} & bridged
    ]
    return Inventory(
        node=node,
        boot_id=boot_id,
        driver_version=driver.driver_version,
        numa_nodes=sysfs.numa_nodes,
        pci=sysfs.pci,
        gpus=tuple(item.gpu for item in gpus),
        bridges=tuple(bridges),
        hcas=sysfs.hcas,
        findings=tuple(dict.fromkeys(findings)),
    )


def _sound_gpus(reported: Iterable[DriverGpu], findings: list[Finding]) -> list[DriverGpu]:
    """Those with ids that a kubelet accepts, each id once, in NVML's order."""
    sound: dict[str, DriverGpu] = {}
    for report in sorted(reported, key=lambda item: item.gpu.index):
        uuid = report.gpu.uuid
        if not 0 < len(uuid) <= DEVICE_ID_MAX or not uuid.isprintable():
            findings.append(
                Finding(FindingKind.MALFORMED, report.gpu.address, f"UUID {uuid[:80]!r}")
            )
        elif uuid in sound:
            findings.append(Finding(FindingKind.CONFLICT, uuid, "two GPUs have this UUID"))
        else:
            sound[uuid] = report
    return list(sound.values())


def _bridges(gpus: Sequence[DriverGpu], findings: list[Finding]) -> list[Bridge]:
    """Pairs of GPUs whose links all lead to each other."""
    by_address = {item.gpu.address: item for item in gpus}
    bridges = []
    for item in gpus:
        peers = {peer for peer in item.link_peers if peer in by_address}
        if len(peers) != 1:
            if peers:
                text = f"NVLink to {len(peers)} GPUs: not a bridged pair, taken as single"
                findings.append(Finding(FindingKind.CONFLICT, item.gpu.uuid, text))
            continue
        other = by_address[peers.pop()]
        back = {peer for peer in other.link_peers if peer in by_address}
        if back != {item.gpu.address} or other is item:
            text = f"NVLink to {other.gpu.uuid}, which does not lead back"
            findings.append(Finding(FindingKind.CONFLICT, item.gpu.uuid, text))
        elif item.gpu.index < other.gpu.index:
            links = min(
                item.link_peers.count(other.gpu.address), other.link_peers.count(item.gpu.address)
            )
            bridges.append(Bridge(item.gpu.uuid, other.gpu.uuid, links))
    return bridges

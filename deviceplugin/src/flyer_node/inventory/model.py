"""Hardware inventory of a node: PCIe tree, NUMA nodes, GPUs, NVLink bridges, HCAs.

The device plugin, the allocator, NCCL's topology file and health monitoring use this model. It has
the detected hardware, not its health, which changes every second. A value that could not be read is
a `Finding`, never an exception and never a default: an unknown NUMA node is None.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property

__all__ = [
    "Bridge",
    "Finding",
    "FindingKind",
    "Gpu",
    "Hca",
    "HcaPort",
    "Inventory",
    "Link",
    "LinkLayer",
    "NumaNode",
    "PciDevice",
]


class FindingKind(enum.StrEnum):
    """Ways in which a node's description can be wrong or incomplete."""

    MISSING = "Missing"
    """A file or folder that should exist does not."""
    UNREADABLE = "Unreadable"
    """It exists and cannot be read."""
    MALFORMED = "Malformed"
    """The value was read and is invalid."""
    LOOP = "Loop"
    """A link that leads to itself, out of the tree, or a device above itself."""
    CONFLICT = "Conflict"
    """Two sources contradict each other."""
    DRIVER = "Driver"
    """The driver refused, hung or lost a device."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing that is wrong with the description: where, what was found, what was expected."""

    kind: FindingKind
    where: str
    detail: str


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link: gigatransfers a second and lanes."""

    gigatransfers: float
    lanes: int


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device or bridge on the PCIe tree."""

    address: str
    """Domain, bus, device, function in lower case: 0000:01:00.0."""
    root_complex: str
    """The host bridge it hangs below: pci0000:00. On EPYC Rome and Milan all that hangs below one
    shares about 37.5 GB/s to the CPU (paper, section IV-D3)."""
    upstream: tuple[str, ...]
    """Addresses of the bridges above it, the root port first; empty for a root complex device."""
    class_code: int
    """24 bits: base class, subclass, interface."""
    vendor: int
    device: int
    subsystem_vendor: int = 0
    subsystem_device: int = 0
    numa_node: int | None = None
    """None if the firmware does not report it (sysfs: -1)."""
    link: Link | None = None
    link_max: Link | None = None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node."""

    id: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as driver and PCIe tree describe it."""

    uuid: str
    index: int
    """NVML's index: the order of PCI addresses. For people; ids are UUIDs."""
    minor: int | None
    """N of /dev/nvidiaN; None if the driver does not report it."""
    address: str
    name: str = ""
    memory_bytes: int = 0
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Bridge:
    """An NVLink bridge between two GPUs: the pair."""

    first: str
    """UUID; the one with the lower index."""
    second: str
    links: int
    """NVLink links between the two."""

    @property
    def id(self) -> str:
        """Names the pair in at most 63 characters; a GPU has one bridge, so one of them does."""
        return f"pair-{min(self.first, self.second)}"


class LinkLayer(enum.StrEnum):
    """Link layer of a port; determines the field that carries the traffic class."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"


@dataclass(frozen=True, slots=True)
class HcaPort:
    """One port of an HCA as it was found (its state changes; health watches it)."""

    number: int
    link_layer: LinkLayer
    state: str = ""
    """Lower case word of sysfs: active, armed, init, down."""
    rate_gbps: float = 0.0


@dataclass(frozen=True, slots=True)
class Hca:
    """A host channel adapter."""

    name: str
    """Kernel name, for example mlx5_0."""
    address: str | None
    """PCI address; None for software devices (rxe, siw)."""
    node_guid: str = ""
    firmware: str = ""
    board: str = ""
    numa_node: int | None = None
    verbs_device: str | None = None
    """Name below /dev/infiniband: uverbs0."""
    management_devices: tuple[str, ...] = ()
    """umadN of its ports; optional, never a reason to call the device broken."""
    ports: tuple[HcaPort, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """All of a node."""

    node: str
    boot_id: str = ""
    driver_version: str = ""
    numa_nodes: tuple[NumaNode, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    hcas: tuple[Hca, ...] = ()
    findings: tuple[Finding, ...] = field(default=())

    @cached_property
    def pci_by_address(self) -> dict[str, PciDevice]:
        """PCIe devices by address."""
        return {device.address: device for device in self.pci}

    @cached_property
    def gpus_by_uuid(self) -> dict[str, Gpu]:
        """GPUs by UUID."""
        return {gpu.uuid: gpu for gpu in self.gpus}

    @cached_property
    def bridge_of(self) -> dict[str, Bridge]:
        """The bridge of every bridged GPU."""
        return {uuid: bridge for bridge in self.bridges for uuid in (bridge.first, bridge.second)}

    def numa_of_gpu(self, uuid: str) -> int | None:
        """The NUMA node of a GPU, if known."""
        device = self.pci_by_address.get(self.gpus_by_uuid[uuid].address)
        return device.numa_node if device else None

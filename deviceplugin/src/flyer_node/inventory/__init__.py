"""What a node has: read from sysfs and the driver into one immutable model."""

from flyer_node.inventory.model import (
    Bridge,
    Finding,
    FindingKind,
    Gpu,
    Hca,
    HcaPort,
    Inventory,
    Link,
    LinkLayer,
    NumaNode,
    PciDevice,
)

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

"""Hardware inventory: an immutable model, read from sysfs and the driver."""

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

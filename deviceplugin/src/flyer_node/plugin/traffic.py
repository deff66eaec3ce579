"""Traffic classes of the node: the table of their markings and the environment variables.

InfiniBand Service Level, RoCE traffic class and DSCP are evaluated by different switches: all three
come from this table and are never derived from each other (paper, section VI-A). The values equal
those of the `fabric` crate; a test compares the two.

Service Levels are cooperative: the node does not prevent a process from using another one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer_node.inventory import LinkLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MARKS", "Marks", "TrafficClass", "environment"]


class TrafficClass(enum.StrEnum):
    """Purpose of a connection."""

    OTHER = "other"
    NCCL = "nccl"
    HFREDUCE = "hfreduce"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class Marks:
    """Markings of one class on the three kinds of network."""

    service_level: int
    """InfiniBand, 0 to 15."""
    roce_traffic_class: int
    """The 8 bits of RoCE's GRH."""
    dscp: int
    """DSCP of TCP sockets, 0 to 63."""


MARKS = {
    TrafficClass.OTHER: Marks(0, 0, 0),
    TrafficClass.NCCL: Marks(1, 104, 26),
    TrafficClass.HFREDUCE: Marks(2, 136, 34),
    TrafficClass.STORAGE: Marks(3, 72, 18),
}

_SERVICE_LEVEL_NAMES = {
    TrafficClass.NCCL: ("NCCL_IB_SL", "UCX_IB_SL", "EP_OVERRIDE_RDMA_SL"),
}
_ROCE_NAMES = {
    TrafficClass.NCCL: ("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS"),
}


def environment(
    traffic: TrafficClass, ports: Sequence[tuple[str, int, LinkLayer]], *, prefix: str
) -> dict[str, str]:
    """Environment of a container to which `ports` (HCA, port number, link layer) were allocated.

    `prefix` separates the keys of several resources in one container: FLYER_NCCL, FLYER_HCA, …
    InfiniBand ports set the Service Level, Ethernet ports the traffic class; a container with both
    kinds of ports gets both fields.
    """
    marks = MARKS[traffic]
    layers = {layer for _, _, layer in ports}
    names = sorted({f"{hca}:{number}" for hca, number, _ in ports})
    values = {
        f"{prefix}_TRAFFIC": traffic.value,
        f"{prefix}_DEVICES": ",".join(names),
        f"{prefix}_DSCP": str(marks.dscp),
    }
    if LinkLayer.INFINIBAND in layers:
        keys = (f"{prefix}_SERVICE_LEVEL", *_SERVICE_LEVEL_NAMES.get(traffic, ()))
        values |= dict.fromkeys(keys, str(marks.service_level))
    if LinkLayer.ETHERNET in layers:
        keys = (f"{prefix}_ROCE_TRAFFIC_CLASS", *_ROCE_NAMES.get(traffic, ()))
        values |= dict.fromkeys(keys, str(marks.roce_traffic_class))
    if traffic is TrafficClass.NCCL:
        # '=' requests exact names: a bare mlx5_1 would also match mlx5_10.
        values["NCCL_IB_HCA"] = "=" + ",".join(names)
        values["NCCL_IB_PCI_RELAXED_ORDERING"] = "2"
        values["UCX_NET_DEVICES"] = ",".join(names)
    return values

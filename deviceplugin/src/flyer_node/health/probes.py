"""What a probe says of a device that is to return: two samples of a probation, compared. Pure.

A look finds what is wrong now; a probe asks for more (does it count, is the link as wide as it can
be), and whether anything grew in between. An empty verdict is a pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer_node.hardware.driver import RecoveryAction

if TYPE_CHECKING:
    from flyer_node.hardware.driver import GpuProbe
    from flyer_node.inventory.hca import PortStatus

__all__ = ["gpu_verdict", "pair_verdict", "port_verdict"]

STABLE = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
"""Counters of a port that must not grow while it is on probation."""


def gpu_verdict(before: GpuProbe, after: GpuProbe) -> str:
    """A GPU at the beginning and at the end of its probation."""
    if after.refused:
        return f"it refuses {after.refused}"
    if after.recovery_action:
        return f"the driver asks for {RecoveryAction.name_of(after.recovery_action)}"
    if after.remap_pending:
        return "a memory row waits to be remapped"
    grown = (after.uncorrectable_errors or 0) - (before.uncorrectable_errors or 0)
    if grown > 0:
        return f"{grown} uncorrectable memory errors came"
    lanes, lanes_max = after.link_width, after.link_width_max
    if lanes is not None and lanes_max is not None and lanes < lanes_max:
        return f"its PCIe link came back with {lanes} of {lanes_max} lanes"
    return ""


def pair_verdict(links: int, first: GpuProbe, second: GpuProbe) -> str:
    """A bridge, by what its two ends say."""
    for end in (first, second):
        if end.refused:
            return f"{end.uuid} refuses {end.refused}"
        if end.links_active is None or end.links_active < links:
            return f"{end.links_active or 0} of {links} NVLink links are up"
    return ""


def port_verdict(before: PortStatus, after: PortStatus) -> str:
    """A port at the beginning and at the end of its probation."""
    if after.state != "active":
        return f"the port is {after.state or 'unreadable'}"
    for name in STABLE:
        grown = after.counters.get(name, 0) - before.counters.get(name, 0)
        if grown > 0:
            return f"{name} grew by {grown}"
    return ""

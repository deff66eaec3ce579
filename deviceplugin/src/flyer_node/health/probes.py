"""Recovery probes: compare the samples from the start and the end of a probation. Pure.

An observation detects present faults; a probe also checks for degraded links and for error counters
that increased during the probation. A verdict is the reason of a failure; empty means passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer_node.hardware.driver import RecoveryAction

if TYPE_CHECKING:
    from flyer_node.hardware.driver import GpuProbe
    from flyer_node.inventory.hca import PortStatus

__all__ = ["gpu_verdict", "pair_verdict", "port_verdict"]

STABLE = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
"""Counters of a port that must not increase during probation."""


def gpu_verdict(before: GpuProbe, after: GpuProbe) -> str:
    """Verdict on a GPU."""
    if after.refused:
        return f"GPU query failed: {after.refused}"
    if after.recovery_action:
        return f"the driver requests {RecoveryAction.name_of(after.recovery_action)}"
    if after.remap_pending:
        return "a memory row remap is pending"
    new_errors = (after.uncorrectable_errors or 0) - (before.uncorrectable_errors or 0)
    if new_errors > 0:
        return f"{new_errors} new uncorrectable memory errors"
    lanes, lanes_max = after.link_width, after.link_width_max
    if lanes is not None and lanes_max is not None and lanes < lanes_max:
        return f"the PCIe link has {lanes} of {lanes_max} lanes"
    return ""


def pair_verdict(links: int, first: GpuProbe, second: GpuProbe) -> str:
    """Verdict on a bridge, from both ends."""
    for end in (first, second):
        if end.refused:
            return f"{end.uuid}: query failed: {end.refused}"
        if end.links_active is None or end.links_active < links:
            return f"{end.links_active or 0} of {links} NVLink links are up"
    return ""


def port_verdict(before: PortStatus, after: PortStatus) -> str:
    """Verdict on a port."""
    if after.state != "active":
        return f"the port is {after.state or 'unreadable'}"
    for name in STABLE:
        increase = after.counters.get(name, 0) - before.counters.get(name, 0)
        if increase > 0:
            return f"{name} increased by {increase}"
    return ""

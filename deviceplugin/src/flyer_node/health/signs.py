"""What observations and events mean: from numbers of the hardware to looks and faults. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer_node.hardware.driver import EventKind, RecoveryAction
from flyer_node.health.machine import Fault, Look, Severity

if TYPE_CHECKING:
    from flyer_node.hardware.driver import GpuStatus
    from flyer_node.health.policy import Timers, XidRule
    from flyer_node.inventory.hca import PortStatus

__all__ = [
    "KernelXid",
    "bridge_look",
    "event_fault",
    "gpu_look",
    "kernel_xid",
    "port_look",
    "xid_fault",
]

_XID_LINE = re.compile(
    r"NVRM: Xid \(PCI:(?P<address>[0-9a-fA-F:.]{7,16})\): (?P<code>\d{1,4})"
    r"(?:, pid='?(?P<pid>\d{1,10}|<unknown>)'?)?(?:, name=(?P<name>[^,]{1,64}))?"
)


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An Xid as the kernel's log tells it."""

    address: str
    """PCI address without function: 0000:01:00."""
    code: int
    process: str
    """Process id, or empty."""
    line: str


def kernel_xid(line: str) -> KernelXid | None:
    """Reads a record of the kernel's log; None if it is about something else.

    The driver's records start with its name. The kernel quotes text of processes in its own, such
    as an unknown option of a mount.
    """
    match = _XID_LINE.match(line)
    if match is None:
        return None
    pid = match["pid"] or ""
    return KernelXid(
        address=match["address"].lower(),
        code=int(match["code"]),
        process=pid if pid.isdecimal() else "",
        line=line[:300],
    )


def xid_fault(rule: XidRule, severity: Severity, evidence: str) -> Fault:
    """The fault that an Xid is by its row."""
    return Fault(
        reason=f"Xid{rule.code}",
        message=f"Xid {rule.code} ({rule.klass}); {rule.source}",
        severity=severity,
        remedy=rule.remedy,
        evidence=evidence,
        needs_reset=rule.reset,
    )


def gpu_look(status: GpuStatus, before: GpuStatus | None = None) -> Look:
    """What one look at a GPU says, compared with the one before."""
    if not status.answers:
        lost = Fault(
            "GpuLost",
            f"the GPU does not answer: {status.error}",
            Severity.UNHEALTHY,
            "GPU reset or node reboot",
            evidence=status.error,
        )
        return Look(fault=lost, gone=True)
    if status.recovery_action:
        name = RecoveryAction.name_of(status.recovery_action)
        asked = Fault(
            "RecoveryAction",
            f"the driver asks for {name}",
            Severity.UNHEALTHY,
            name.replace("_", " ").lower(),
            evidence=f"recovery action {status.recovery_action}",
        )
        return Look(fault=asked, action=name)
    if status.remap_failed:
        return Look(
            fault=Fault(
                "RowRemapFailed",
                "a memory row could not be remapped",
                Severity.UNHEALTHY,
                "replacement of the GPU",
                evidence="remapped rows: failure",
            )
        )
    if status.remap_pending:
        return Look(
            fault=Fault(
                "RowRemapPending",
                "a memory row waits to be remapped",
                Severity.SUSPECT,
                "GPU reset at the next idle moment",
                evidence="remapped rows: pending",
            )
        )
    grown = _grown(before, status)
    if grown > 0:
        text = f"{grown} uncorrectable memory errors came"
        remedy = "GPU reset at the next idle moment"
        return Look(fault=Fault("UncorrectableEcc", text, Severity.SUSPECT, remedy, evidence=text))
    return Look(was_reset=grown < 0)


def _grown(before: GpuStatus | None, after: GpuStatus) -> int:
    """New uncorrectable errors; below 0, the volatile counter began anew."""
    if before is None or before.uncorrectable_errors is None or after.uncorrectable_errors is None:
        return 0
    return after.uncorrectable_errors - before.uncorrectable_errors


def event_fault(kind: EventKind) -> Fault | None:
    """The fault that an event of the driver is, other than an Xid; None where a look decides."""
    if kind is EventKind.UNAVAILABLE:
        return Fault(
            "GpuUnavailable",
            "the driver reports the GPU as unavailable",
            Severity.UNHEALTHY,
            "GPU reset or node reboot",
            evidence="event: GPU unavailable",
            needs_reset=True,
        )
    if kind is EventKind.ECC:
        text = "a double-bit memory error was reported"
        remedy = "GPU reset at the next idle moment"
        return Fault("UncorrectableEcc", text, Severity.SUSPECT, remedy, evidence="event: ECC")
    return None


def bridge_look(links: int, first: GpuStatus, second: GpuStatus) -> Look | None:
    """What one look at both ends says of a bridge; None if an end cannot be seen."""
    if first.links_active is None or second.links_active is None:
        return None
    active = min(first.links_active, second.links_active)
    if active >= links:
        return Look()
    return Look(
        fault=Fault(
            "NvLinkDown",
            f"{active} of {links} NVLink links are up",
            Severity.UNHEALTHY,
            "all links up again; a repeater is reseated",
            evidence=f"links active: {first.links_active} and {second.links_active}",
        )
    )


def port_look(status: PortStatus, down_seconds: float, timers: Timers) -> Look:
    """What one look at a port says, if it has been down for `down_seconds`."""
    if status.state == "active":
        return Look()
    text = status.state or "unreadable"
    severity = Severity.UNHEALTHY if down_seconds >= timers.port_grace else Severity.SUSPECT
    remedy = "cable, switch port and subnet manager: the port must become active"
    return Look(
        fault=Fault(
            "PortDown",
            f"the port is {text} ({status.physical or 'no physical state'})",
            severity,
            remedy,
            evidence=f"state {text}, physical state {status.physical}",
        )
    )

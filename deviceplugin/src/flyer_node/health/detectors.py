"""Fault detectors: turn hardware readings and events into observations and faults. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer_node.hardware.driver import EventKind, RecoveryAction
from flyer_node.health.state_machine import Fault, Observation, Severity

if TYPE_CHECKING:
    from flyer_node.hardware.driver import GpuStatus
    from flyer_node.health.policy import Timers, XidRule
    from flyer_node.inventory.hca import PortStatus

__all__ = [
    "KernelXid",
    "event_fault",
    "kernel_xid",
    "observe_bridge",
    "observe_gpu",
    "observe_port",
    "xid_fault",
]

_XID_LINE = re.compile(
    r"NVRM: Xid \(PCI:(?P<address>[0-9a-fA-F:.]{7,16})\): (?P<code>\d{1,4})"
    r"(?:, pid='?(?P<pid>\d{1,10}|<unknown>)'?)?(?:, name=(?P<name>[^,]{1,64}))?"
)


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An Xid from the kernel log."""

    address: str
    """PCI address without function: 0000:01:00."""
    code: int
    process: str
    """Process id, or empty."""
    line: str


def kernel_xid(line: str) -> KernelXid | None:
    """Parses a kernel log record; None if it does not report an Xid.

    The driver's records start with its name: text of processes that other records quote, such as an
    unknown mount option, never matches.
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
    """The fault of an Xid, by its rule."""
    return Fault(
        reason=f"Xid{rule.code}",
        message=f"Xid {rule.code} ({rule.klass}); {rule.source}",
        severity=severity,
        remedy=rule.remedy,
        evidence=evidence,
        needs_reset=rule.reset,
    )


def observe_gpu(status: GpuStatus, before: GpuStatus | None = None) -> Observation:
    """Evaluates the status of a GPU against the previous one."""
    if not status.answers:
        fault = Fault(
            "GpuLost",
            f"the GPU does not answer: {status.error}",
            Severity.UNHEALTHY,
            "GPU reset or node reboot",
            evidence=status.error,
        )
        return Observation(fault=fault, unresponsive=True)
    if status.recovery_action:
        name = RecoveryAction.name_of(status.recovery_action)
        requested = Fault(
            "RecoveryAction",
            f"the driver requests {name}",
            Severity.UNHEALTHY,
            name.replace("_", " ").lower(),
            evidence=f"recovery action {status.recovery_action}",
        )
        return Observation(fault=requested, recovery_action=name)
    if status.remap_failed:
        return Observation(
            fault=Fault(
                "RowRemapFailed",
                "a memory row could not be remapped",
                Severity.UNHEALTHY,
                "replacement of the GPU",
                evidence="remapped rows: failure",
            )
        )
    if status.remap_pending:
        return Observation(
            fault=Fault(
                "RowRemapPending",
                "a memory row remap is pending",
                Severity.SUSPECT,
                "GPU reset at the next idle moment",
                evidence="remapped rows: pending",
            )
        )
    new_errors = _new_memory_errors(before, status)
    if new_errors > 0:
        text = f"{new_errors} new uncorrectable memory errors"
        remedy = "GPU reset at the next idle moment"
        return Observation(
            fault=Fault("UncorrectableEcc", text, Severity.SUSPECT, remedy, evidence=text)
        )
    return Observation(was_reset=new_errors < 0)


def _new_memory_errors(before: GpuStatus | None, after: GpuStatus) -> int:
    """New uncorrectable errors; negative if the volatile counter was reset."""
    if before is None or before.uncorrectable_errors is None or after.uncorrectable_errors is None:
        return 0
    return after.uncorrectable_errors - before.uncorrectable_errors


def event_fault(kind: EventKind) -> Fault | None:
    """The fault of a driver event other than an Xid; None if the next poll decides."""
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


def observe_bridge(links: int, first: GpuStatus, second: GpuStatus) -> Observation | None:
    """Evaluates a bridge from both ends; None if an end does not report its links."""
    if first.links_active is None or second.links_active is None:
        return None
    active = min(first.links_active, second.links_active)
    if active >= links:
        return Observation()
    return Observation(
        fault=Fault(
            "NvLinkDown",
            f"{active} of {links} NVLink links are up",
            Severity.UNHEALTHY,
            "all links up again; a repeater is reseated",
            evidence=f"links active: {first.links_active} and {second.links_active}",
        )
    )


def observe_port(status: PortStatus, down_seconds: float, timers: Timers) -> Observation:
    """Evaluates the status of a port that has been down for `down_seconds`."""
    if status.state == "active":
        return Observation()
    text = status.state or "unreadable"
    severity = Severity.UNHEALTHY if down_seconds >= timers.port_grace else Severity.SUSPECT
    remedy = "cable, switch port and subnet manager: the port must become active"
    return Observation(
        fault=Fault(
            "PortDown",
            f"the port is {text} ({status.physical or 'no physical state'})",
            severity,
            remedy,
            evidence=f"state {text}, physical state {status.physical}",
        )
    )

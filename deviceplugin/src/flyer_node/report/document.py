"""The status of NodeHealth as plain JSON: pure, the same facts give the same document."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flyer_node.health.state_machine import DeviceHealth, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flyer_node.health.store import FaultEvent, Subject
    from flyer_node.inventory import Inventory

__all__ = ["node_state", "status_document"]

DEVICES_MAX, FAULTS_MAX = 128, 64
DEVICE_KINDS = {"gpu": "GPU", "pair": "NVLinkPair", "hca": "HCA"}
"""The values of `status.devices[].kind` by kind of device."""
_ORDER = (State.UNHEALTHY, State.UNKNOWN, State.RECOVERING, State.SUSPECT)
"""Worst first; a gang needs the whole node, so one device decides."""


def status_document(
    inventory: Inventory,
    health: Mapping[Subject, DeviceHealth],
    fault_events: Iterable[FaultEvent],
    *,
    agent_version: str,
    before: Mapping[str, Any],
    now: float,
) -> dict[str, Any]:
    """The whole status. `before` is the last one: what did not change keeps its times."""
    state, reason, message = node_state(health)
    since = now
    if before.get("state") == state.value and before.get("reason", "") == reason:
        since = _parse(before.get("since")) or now
    document: dict[str, Any] = {
        "state": state.value,
        "reason": reason,
        "message": message[:1024],
        "since": _time(since),
        "bootId": inventory.boot_id,
        "agentVersion": agent_version,
        "inventory": {
            "gpuModel": next((gpu.name for gpu in inventory.gpus), "")[:128],
            "gpus": len(inventory.gpus),
            "bridgePairs": len(inventory.bridges),
            "hcas": len(inventory.hcas),
            "numaNodes": len(inventory.numa_nodes),
            "driverVersion": inventory.driver_version[:64],
        },
        "devices": [
            _device(subject, record)
            for subject, record in sorted(health.items())
            if record.state is not State.HEALTHY or record.failures
        ][:DEVICES_MAX],
        "faults": [
            {
                "time": _time(fault.at),
                "device": fault.device[:63],
                "code": fault.code,
                "message": fault.message[:1024],
                "count": fault.count,
            }
            for fault in sorted(fault_events, key=lambda fault: -fault.at)
        ][:FAULTS_MAX],
        "conditions": _conditions(inventory, state, reason, message, before, now),
    }
    return document


def node_state(health: Mapping[Subject, DeviceHealth]) -> tuple[State, str, str]:
    """The worst device's state, with its reason and how many share it."""
    for state in _ORDER:
        unhealthy = [
            (subject, record) for subject, record in sorted(health.items()) if record.state is state
        ]
        if unhealthy:
            subject, record = unhealthy[0]
            reason = _reason(record)
            suffix = f" (and {len(unhealthy) - 1} more)" if len(unhealthy) > 1 else ""
            return state, reason, f"{subject.kind} {subject.id}: {_message(record)}{suffix}"
    return State.HEALTHY, "", ""


def _device(subject: Subject, record: DeviceHealth) -> dict[str, Any]:
    return {
        "id": subject.id,
        "kind": DEVICE_KINDS[subject.kind],
        "state": record.state.value,
        "reason": _reason(record),
        "message": _message(record)[:1024],
        "evidence": record.evidence[:2048],
        "recovery": record.remedy[:256],
        "since": _time(record.since),
    }


def _reason(record: DeviceHealth) -> str:
    return record.reason if record.observable else "NotObserved"


def _message(record: DeviceHealth) -> str:
    return (
        record.message if record.observable else f"cannot be observed: {record.unobservable_reason}"
    )


def _conditions(
    inventory: Inventory,
    state: State,
    reason: str,
    message: str,
    before: Mapping[str, Any],
    now: float,
) -> list[dict[str, Any]]:
    """DevicesHealthy: nothing is out of service. DescriptionComplete: sysfs and driver agree."""
    status = {State.HEALTHY: "True", State.SUSPECT: "True", State.UNKNOWN: "Unknown"}
    count = len(inventory.findings)
    first = inventory.findings[0] if inventory.findings else None
    facts = (
        (
            "DevicesHealthy",
            status.get(state, "False"),
            reason or "AllHealthy",
            message or f"{len(inventory.gpus)} GPUs, {len(inventory.hcas)} HCAs",
        ),
        (
            "DescriptionComplete",
            "False" if first else "True",
            first.kind.value if first else "Complete",
            f"{count} findings; the first: {first.where}: {first.detail}" if first else "",
        ),
    )
    old = {condition["type"]: condition for condition in before.get("conditions", ())}
    return [
        {
            "type": kind,
            "status": value,
            "reason": why,
            "message": text[:1024],
            "lastTransitionTime": old[kind]["lastTransitionTime"]
            if old.get(kind, {}).get("status") == value
            else _time(now),
        }
        for kind, value, why, text in facts
    ]


def _time(seconds: float) -> str:
    moment = datetime.fromtimestamp(round(seconds * 1000) / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _parse(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None

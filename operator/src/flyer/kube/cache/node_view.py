"""The view of a node: its engine state, and what its pods depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from flyer.engine import Node
from flyer.kube.pods.names import RESOURCE_GPU

__all__ = ["CORDONED", "NodeView", "Strings", "shape_node"]

CORDONED: Final = "cordoned"  # reason of a cordoned node

LABEL_ZONE: Final = "fireflyer.dev/zone"
LABEL_ZONE_COMMON: Final = "topology.kubernetes.io/zone"
LABEL_LEAF: Final = "fireflyer.dev/leaf"
LABEL_NODE_CLASS: Final = "fireflyer.dev/node-class"
LABEL_DEDICATED: Final = "fireflyer.dev/dedicated"

# Taints that do not make a node not ready, and taints of a lost node.
_OUR_TAINTS: Final = frozenset({"fireflyer.dev/dedicated"})
_LOST_TAINTS: Final = frozenset(
    {"node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service"}
)
# Resources that determine a node's rank slots, in this order; otherwise its cores do.
_SLOT_RESOURCES: Final = (RESOURCE_GPU, "nvidia.com/gpu")

# Default port of a kubelet.
KUBELET_PORT: Final = 10250

Strings = dict[str, str]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node: its engine state, the properties its pods depend on, and whether it is lost."""

    node: Node
    managed: bool  # by Fire-Flyer
    dedicated: bool
    lost: str  # the cause; empty: not lost
    allocatable: Strings = field(default_factory=dict)
    labels: Strings = field(default_factory=dict)
    address: str = ""  # empty: unknown
    port: int = KUBELET_PORT


def shape_node(value: dict[str, Any]) -> NodeView:
    """The view of a Node's JSON."""
    metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
    labels = metadata.get("labels") or {}
    taints = spec.get("taints") or []
    allocatable = {
        str(key): str(amount) for key, amount in (status.get("allocatable") or {}).items()
    }
    conditions = status.get("conditions") or ()
    ready: Strings = next(
        (condition for condition in conditions if condition["type"] == "Ready"), {}
    )
    loss = _lost(ready, taints)
    reason = loss or _unready(ready, spec, taints)
    capacity = status.get("capacity") or {}
    # Without devices (capacity 0) a node's cores count. A node whose devices are all unhealthy
    # (allocatable 0, capacity above) has no slots.
    slots = next(
        (
            _number(allocatable[name])
            for name in _SLOT_RESOURCES
            if name in allocatable
            and (_number(allocatable[name]) or _number(str(capacity.get(name, "0"))))
        ),
        _cores(allocatable.get("cpu", "1")),
    )
    if not slots:
        reason = reason or "no allocatable device"
    dedicated = labels.get(LABEL_DEDICATED) == "true"
    return NodeView(
        node=Node(
            name=metadata["name"],
            zone=labels.get(LABEL_ZONE) or labels.get(LABEL_ZONE_COMMON) or "default",
            leaf=labels.get(LABEL_LEAF, ""),
            node_class=labels.get(LABEL_NODE_CLASS) or "default",
            slots=slots,
            ready=not reason,
            reason=reason,
        ),
        managed=dedicated or LABEL_NODE_CLASS in labels,
        dedicated=dedicated,
        lost=loss,
        allocatable=allocatable,
        labels=labels,
        address=_address(status),
        port=_port(status),
    )


def _address(status: dict[str, Any]) -> str:
    addresses = status.get("addresses") or ()
    return next(
        (address["address"] for address in addresses if address.get("type") == "InternalIP"), ""
    )


def _port(status: dict[str, Any]) -> int:
    kubelet = (status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}
    return int(kubelet.get("Port") or KUBELET_PORT)


def _lost(ready: Strings, taints: list[dict[str, Any]]) -> str:
    """The control plane sets Ready to Unknown when a kubelet is silent."""
    if ready.get("status") == "Unknown":
        return ready.get("reason") or "NodeStatusUnknown"
    lost_taints = [taint["key"] for taint in taints if taint.get("key") in _LOST_TAINTS]
    return lost_taints[0] if lost_taints else ""


def _unready(ready: Strings, spec: dict[str, Any], taints: list[dict[str, Any]]) -> str:
    if ready.get("status") != "True":
        return f"not ready: {ready.get('reason', 'no Ready condition')}"
    if spec.get("unschedulable"):
        return CORDONED
    for taint in taints:
        if taint.get("key") not in _OUR_TAINTS and taint.get("effect") in (
            "NoSchedule",
            "NoExecute",
        ):
            return f"tainted {taint.get('key')}"
    return ""


def _cores(text: str) -> int:
    """Whole cores of a quantity such as 64 or 63500m."""
    return int(text[:-1]) // 1000 if text.endswith("m") else _number(text)


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0

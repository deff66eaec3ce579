"""Conditions of quotas and topologies: pure functions of the object and the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flyer.api import FlyerQuota, FlyerTopology, format_timestamp

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from flyer.engine import Node

__all__ = ["condition_patch", "quota_verdict", "topology_verdict"]

_NAMES_MAX: Final = 5

Verdict = tuple[str, bool, str, str]  # condition type, status, reason, message


def quota_verdict(value: Mapping[str, Any], nodes: Collection[Node]) -> Verdict:
    """Condition Effective: whether the quota limits any nodes."""
    try:
        spec = FlyerQuota.model_validate(_plain(value)).spec
    except ValidationError as error:
        return "Effective", False, "Invalid", _first(error)
    classes = {node.node_class for node in nodes}
    if spec.node_class not in ("*", *classes):
        class_names = ", ".join(sorted(classes)[:_NAMES_MAX]) or "none"
        return (
            "Effective", False, "UnknownNodeClass",
            f"spec.node_class: no node has the class {spec.node_class}; there are: {class_names}",
        )  # fmt: skip
    have = sum(spec.node_class in ("*", node.node_class) for node in nodes)
    if spec.nodes >= have:
        return (
            "Effective",
            True,
            "NeverReached",
            f"{spec.nodes} of {have} nodes: the limit is never reached",
        )
    return "Effective", True, "Effective", f"{spec.nodes} of {have} nodes"


def topology_verdict(value: Mapping[str, Any], nodes: Collection[Node]) -> Verdict:
    """Condition Consistent: whether nodes and topology agree about zones and leaves."""
    try:
        spec = FlyerTopology.model_validate(_plain(value)).spec
    except ValidationError as error:
        return "Consistent", False, "Invalid", _first(error)
    zones = {zone.name: zone.leaves for zone in spec.zones}
    unknown = sorted(node.name for node in nodes if zones and node.zone not in zones)
    if unknown:
        return (
            "Consistent", False, "UnknownZone",
            f"{len(unknown)} nodes are in zones that spec.zones does not name, such as "
            f"{', '.join(unknown[:_NAMES_MAX])}: label them fireflyer.dev/zone or add the zone",
        )  # fmt: skip
    misplaced = sorted(
        node.name
        for node in nodes
        if zones.get(node.zone) and node.leaf and node.leaf not in zones[node.zone]
    )
    if misplaced:
        return (
            "Consistent", False, "UnknownLeaf",
            f"{len(misplaced)} nodes are at leaves that their zone does not have, such as "
            f"{', '.join(misplaced[:_NAMES_MAX])}: correct fireflyer.dev/leaf or spec.zones",
        )  # fmt: skip
    return "Consistent", True, "Consistent", f"{len(nodes)} nodes in {len(zones) or 'any'} zones"


def condition_patch(
    value: Mapping[str, Any], verdict: Verdict, now: float
) -> dict[str, Any] | None:
    """The status patch with this condition; None: the status has it already."""
    kind, holds, reason, message = verdict
    status = value.get("status") or {}
    generation = value["metadata"].get("generation")
    conditions = {entry["type"]: dict(entry) for entry in status.get("conditions") or ()}
    before = conditions.get(kind, {})
    text = "True" if holds else "False"
    since = before.get("lastTransitionTime") if before.get("status") == text else None
    condition = {
        "type": kind, "status": text, "reason": reason, "message": message,
        "lastTransitionTime": since or format_timestamp(now), "observedGeneration": generation,
    }  # fmt: skip
    if before == condition and status.get("observedGeneration") == generation:
        return None
    conditions[kind] = condition
    return {"conditions": list(conditions.values()), "observedGeneration": generation}


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {name: field for name, field in value["metadata"].items() if name != "managedFields"}
    main_fields = {name: value[name] for name in ("apiVersion", "kind", "spec") if name in value}
    return {**main_fields, "metadata": metadata}


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"

"""Whether a pod fits on nodes: its node selector, required node affinity and requests. Pure.

The operator binds pods on dedicated nodes itself, so no scheduler checks these fields, and the
kubelet would reject a pod only after the nodes are assigned. This is the check before.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["NodeFacts", "misfit", "quantity", "refusals_by_nodes", "requests_of"]

_QUANTITY: Final = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)([eE][+-]?[0-9]{1,3}|.*)")
_SUFFIXES: Final = {
    "": Decimal(1),
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("kMGTPE", 1)},
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)},
    "m": Decimal("1e-3"), "u": Decimal("1e-6"), "n": Decimal("1e-9"),
}  # fmt: skip
# Quotients of larger amounts exceed the precision of a Decimal.
_EXACT_BELOW: Final = Decimal(10) ** 24
_TEMPLATE: Final = "spec.template.spec"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The properties of a node that a pod may depend on."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)


def quantity(value: Any) -> Decimal | None:
    """A Kubernetes quantity; None: it is not one."""
    match = _QUANTITY.fullmatch(str(value)[:64])
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return Decimal(number + suffix)
    scale = _SUFFIXES.get(suffix)
    return None if scale is None else Decimal(number) * scale


def requests_of(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """The pod's effective requests, as the kubelet computes them."""
    total: dict[str, Decimal] = {}
    for container in spec.get("containers") or ():
        _add(total, _requests(container))
    sidecars: dict[str, Decimal] = {}  # sum of native sidecars
    highest: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        own = _requests(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, own)
            own = {}
        alone = dict(sidecars)
        _add(alone, own)
        highest = {
            name: max(highest.get(name, Decimal(0)), alone.get(name, Decimal(0)))
            for name in {*highest, *alone}
        }
    _add(total, sidecars)
    total = {
        name: max(total.get(name, Decimal(0)), highest.get(name, Decimal(0)))
        for name in {*total, *highest}
    }
    _add(total, _amounts(spec.get("overhead") or {}))
    return total


def misfit(spec: Mapping[str, Any], node: NodeFacts) -> str:
    """The first field that this node does not satisfy, with the reason; empty: the pod fits."""
    selector = spec.get("nodeSelector") or {}
    for key, value in selector.items():
        if node.labels.get(key) != value:
            actual = node.labels.get(key)
            has = f"it is {json.dumps(actual)}" if actual is not None else "the label is missing"
            return f"{_TEMPLATE}.nodeSelector: requires {key}={value}, but on {node.name} {has}"
    required = _required(spec)
    if required is not None and not any(_holds(term, node) for term in required):
        return (
            f"{_TEMPLATE}.affinity.nodeAffinity: the labels of {node.name} match none of the "
            "nodeSelectorTerms"
        )
    for name, amount in sorted(requests_of(spec).items()):
        offered = quantity(node.allocatable.get(name, "0")) or Decimal(0)
        if amount > offered:
            return (
                f"{_TEMPLATE}.containers: request {_text(amount)} of {name}, but {node.name} has "
                f"{node.allocatable.get(name, '0')} allocatable"
            )
    return ""


def refusals_by_nodes(pods: Sequence[tuple[Mapping[str, Any], NodeFacts]]) -> Iterator[str]:
    """Why not all of these pods fit on their nodes: a gang may get any of the nodes.

    Nothing without nodes: then the scheduler reports what is missing.
    """
    misfits = [why for spec, node in pods if (why := misfit(spec, node))]
    if not misfits:
        return
    if len(misfits) == len(pods):
        many = f"it fits on none of the {len(pods)} eligible nodes"
    else:
        many = f"it does not fit on {len(misfits)} of the {len(pods)} eligible nodes"
    yield (
        f"{misfits[0]}; {many}: request what every node of a class has, or put the nodes that fit "
        "into a separate class (label fireflyer.dev/node-class) and name it in spec.nodeClass"
    )


def _required(spec: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return None if required is None else required.get("nodeSelectorTerms") or []


def _holds(term: Mapping[str, Any], node: NodeFacts) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False  # as for kube-scheduler
    own = {"metadata.name": node.name}
    return all(_matches(expression, node.labels) for expression in expressions) and all(
        _matches(item, own) for item in fields
    )


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(expression.get("key", ""))
    values = expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            if value is None or len(values) != 1:
                return False
            try:
                difference = int(value[:20]) - int(values[0][:20])
            except ValueError:
                return False
            return difference > 0 if operator == "Gt" else difference < 0
        case _:
            return True  # an unknown operator: the API server checks it


def _requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    """A limit without a request counts as a request."""
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _amounts(values: Mapping[str, Any]) -> dict[str, Decimal]:
    # The API server rejects invalid quantities.
    return {
        name: parsed for name, amount in values.items() if (parsed := quantity(amount)) is not None
    }


def _add(total: dict[str, Decimal], more: Mapping[str, Decimal]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, Decimal(0)) + amount


def _text(amount: Decimal) -> str:
    if amount >= _EXACT_BELOW:
        return f"{amount:.3g}"
    for suffix in ("Ti", "Gi", "Mi", "Ki"):
        if amount >= _SUFFIXES[suffix] and amount % _SUFFIXES[suffix] == 0:
            return f"{amount // _SUFFIXES[suffix]}{suffix}"
    return f"{amount.normalize():f}"

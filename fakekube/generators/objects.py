"""Random objects for property tests, as users, kubelets and other controllers write them.

`any_object` replaces some fields of a valid object of Fire-Flyer's kinds by random JSON.
`any_typed` creates a value of a Kubernetes type that a real API server could store.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

from flyer.api import crd, names

from fakekube.generators.pod_templates import TEXTS, any_json, any_template

if TYPE_CHECKING:
    from random import Random

__all__ = ["FIELDS_OF", "any_metadata", "any_object", "any_typed", "valid_object"]

_OURS: Final = (
    "job", "attempt", "node-rank", "history", "zone", "leaf", "node-class", "dedicated", "user",
    "changed-by", "requeue", "team", "queue", "leader",
)  # fmt: skip
_LABELS: Final = (
    *(f"{names.GROUP}/{name}" for name in _OURS),
    "topology.kubernetes.io/zone", "app", "a/b/c", "ü", "", names.QUEUE_LABEL,
)  # fmt: skip
_VALUES: Final = (
    "", "x", "0", "1", "-1", "9" * 40, "true", "false", "A", "a0", "any-1", "ü", "x" * 64, "٣",
    "null", "1e9", "a b",
)  # fmt: skip
_SCALARS: Final = (
    "", "0s", "1s", "15m", "1h30m", "99999999999h", "-1s", "1", "64Gi", "٣", "normal",
    "extreme-high", "Never", "Now", "Graceful", "*", "default", "#", "Total",
    "2026-11-20T14:05:00Z", "2026-02-31T00:00:00Z", "9999-12-31T23:59:59Z", "a0",
    "x" * 300,
)  # fmt: skip
_NUMBERS: Final = (0, 1, -1, 2, 3, 2**31, 2**53, 2**63 - 1, 2**63, 1.0, 1.5, 1e308)
FIELDS_OF: Final = {
    kind.plural: crd.crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for kind in crd.KINDS
}
_VALID: Final[dict[str, dict[str, Any]]] = {
    names.PLURAL_JOBS: {
        "nodes": 1,
        "template": {"spec": {"containers": [{"name": "t", "image": "i", "command": ["train"]}]}},
    },
    names.PLURAL_QUOTAS: {"nodes": 2, "user": "anna"},
    names.PLURAL_TOPOLOGIES: {},
    names.PLURAL_HEALTHS: {},
}
_KIND_OF: Final = {kind.plural: kind.kind for kind in crd.KINDS}


def valid_object(plural: str, name: str) -> dict[str, Any]:
    """A valid object."""
    value = {"apiVersion": names.API_VERSION, "kind": _KIND_OF[plural]}
    return {**value, "metadata": {"name": name}, "spec": _copy(_VALID[plural])}


def any_object(random: Random, plural: str, name: str, half: str = "spec") -> dict[str, Any]:
    """A valid object with random JSON in one to three fields of its spec or status."""
    value = valid_object(plural, name)
    part = value.setdefault(half, {})
    if plural == names.PLURAL_JOBS and random.random() < 0.3:
        part["template"] = any_template(random)
    for _ in range(random.randrange(1, 4)):
        if random.random() < 0.05:
            part[random.choice(("nonsense", "Nodes", "ü", ""))] = any_json(random, 2)
        else:
            _disturb(random, part, FIELDS_OF[plural][half])
    if random.random() < 0.1:
        value["metadata"].update(any_metadata(random))
    return value


def _disturb(random: Random, holder: dict[str, Any], schema: dict[str, Any]) -> None:
    """Set a field to a nearly valid value or to JSON, or change a field inside it."""
    properties = schema.get("properties")
    if not properties:
        return
    name = random.choice(list(properties))
    part = properties[name]
    inner = part.get("properties")
    if inner and random.random() < 0.7:
        child = holder.setdefault(name, {})
        if isinstance(child, dict):
            _disturb(random, child, part)
            return
    holder[name] = any_json(random, 3) if random.random() < 0.3 else _near(random, part)


def _near(random: Random, schema: dict[str, Any], depth: int = 3) -> Any:
    """A value, mostly of the schema's type and often at its bounds."""
    kind = schema.get("type")
    if random.random() < 0.05:
        return None
    if "enum" in schema and random.random() < 0.8:
        return random.choice(schema["enum"])
    if kind == "integer":
        bounds = [schema[name] + by for name in ("minimum", "maximum") if name in schema
                  for by in (-1, 0, 1)]  # fmt: skip
        return random.choice([*bounds, *_NUMBERS])
    if kind == "boolean":
        return random.random() < 0.5
    if kind == "array" and depth:
        items = schema.get("items") or {}
        return [_near(random, items, depth - 1) for _ in range(random.randrange(4))]
    if kind == "object" and depth:
        properties = schema.get("properties") or {}
        names = [name for name in properties if random.random() < 0.6]
        return {name: _near(random, properties[name], depth - 1) for name in names}
    return random.choice((*_SCALARS, *TEXTS, *_VALUES))


def any_metadata(random: Random, uids: tuple[str, ...] = ()) -> dict[str, Any]:
    """Labels, annotations, finalizers and owners, some of them invalid."""
    metadata: dict[str, Any] = {}
    for field in ("labels", "annotations"):
        if random.random() < 0.7:
            labels = random.choices(_LABELS, k=random.randrange(5))
            metadata[field] = {name: random.choice(_VALUES) for name in labels}
    if random.random() < 0.3:
        metadata["finalizers"] = random.choices((f"{names.GROUP}/release", "x/y", "x", ""), k=1)
    if random.random() < 0.6:
        metadata["ownerReferences"] = [
            any_owner(random, uids) for _ in range(random.choice((1, 1, 1, 2, 3)))
        ]
    return metadata


def any_owner(random: Random, uids: tuple[str, ...] = ()) -> dict[str, Any]:
    """An owner reference: to a job, dangling, or malformed."""
    value = {
        "apiVersion": random.choice((names.API_VERSION, "fireflyer.dev/v9", "apps/v1", "v1", "")),
        "kind": random.choice((names.KIND_JOB, names.KIND_JOB, "ReplicaSet", "")),
        "name": random.choice(("any-1", "job", "missing", "")),
        "uid": random.choice((*uids, "no-uid", "")),
        "controller": random.choice((True, True, False, None)),
    }
    return {name: item for name, item in value.items() if random.random() < 0.97}


def any_typed(random: Random, kind: str, depth: int = 5) -> Any:
    """A value of a type of the official client, such as V1Pod, with its required fields."""
    if match := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        return [any_typed(random, match[1], depth - 1) for _ in range(random.randrange(3))]
    if match := re.fullmatch(r"[dD]ict[\[(]str, (.+)[\])]", kind):
        picks = random.choices((*_LABELS, "cpu", "memory", "nvidia.com/gpu",
                                 f"{names.GROUP}/gpu"), k=random.randrange(4))  # fmt: skip
        return {name: any_typed(random, match[1], depth - 1) for name in picks}
    if kind == "int":
        return random.choice((0, 1, -1, 137, 10250, 2**31 - 1))
    if kind == "bool":
        return random.random() < 0.5
    if kind == "datetime":
        return random.choice(("2026-11-20T14:05:00Z", "0001-01-01T00:00:00Z"))
    fields = _fields(kind)
    if fields is None:
        return random.choice(_TYPED_TEXTS)
    return {
        name: any_typed(random, of, depth - 1)
        for name, (of, required) in fields.items()
        if required or (depth > 0 and random.random() < 0.3)
    }


_TYPED_TEXTS: Final = (
    *_VALUES, "Ready", "True", "False", "Unknown", "Pending", "Running", "Failed", "Succeeded",
    "InternalIP", "10.0.0.1", "NoSchedule", "NoExecute", "fireflyer.dev/dedicated",
    "node.kubernetes.io/unreachable", "64", "500m", "1e3", "8", "ErrImagePull", "OOMKilled",
    "Unschedulable", "PodScheduled", "FlyerJob", "fireflyer.dev/v1alpha1",
)  # fmt: skip


@functools.cache
def _fields(kind: str) -> dict[str, tuple[str, bool]] | None:
    """Fields of a type of the official client: JSON name, type, whether it is required."""
    from kubernetes.client import models

    model = getattr(models, kind, None)
    if model is None:
        return None
    required = {name for name, info in model.model_fields.items() if info.is_required()}
    return {
        model.attribute_map[name]: (of, name in required)
        for name, of in model.openapi_types.items()
    }


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value

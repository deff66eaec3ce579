"""JSON types of the pod spec fields that `build_pods` reads or extends.

The API server validates the whole pod (see `services.pods.templates`). This check makes
`build_pods` total: for any JSON in a template, either these fields have their types, or the
mismatch is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["misshapen", "without_nulls"]

_DEPTH_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class _List:
    of: Any


@dataclass(frozen=True, slots=True)
class _Map:
    of: Any


@dataclass(frozen=True, slots=True)
class _Scalar:
    types: tuple[type, ...]
    name: str


_TEXT: Final = _Scalar((str,), "a string")
_FLAG: Final = _Scalar((bool,), "true or false")
_COUNT: Final = _Scalar((int,), "an integer")
_QUANTITY: Final = _Scalar((str, int, float), 'a quantity such as 8 or "64Gi"')
_ANY: Final = _Map(None)

_CONTAINER: Final[dict[str, Any]] = {
    "name": _TEXT,
    "image": _TEXT,
    "command": _List(_TEXT),
    "args": _List(_TEXT),
    "env": _List({"name": _TEXT}),
    "resources": {"limits": _Map(_QUANTITY), "requests": _Map(_QUANTITY), "claims": _List(_ANY)},
    "restartPolicy": _TEXT,
    "restartPolicyRules": _List(_ANY),
    "volumeMounts": _List({"name": _TEXT, "mountPath": _TEXT}),
}
_TERMS: Final = _List({
    "matchExpressions": _List({"key": _TEXT, "operator": _TEXT, "values": _List(_TEXT)}),
    "matchFields": _List({"key": _TEXT, "operator": _TEXT, "values": _List(_TEXT)}),
})  # fmt: skip
_POD_TERMS: Final = {"requiredDuringSchedulingIgnoredDuringExecution": _List(_ANY)}
_SPEC: Final[dict[str, Any]] = {
    "activeDeadlineSeconds": _COUNT,
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": _TERMS}
        },
        "podAffinity": _POD_TERMS,
        "podAntiAffinity": _POD_TERMS,
    },
    "containers": _List(_CONTAINER),
    "dnsPolicy": _TEXT,
    "hostNetwork": _FLAG,
    "hostname": _TEXT,
    "imagePullSecrets": _List({"name": _TEXT}),
    "initContainers": _List(_CONTAINER),
    "nodeName": _TEXT,
    "nodeSelector": _Map(_TEXT),
    "overhead": _Map(_QUANTITY),
    "priorityClassName": _TEXT,
    "resourceClaims": _List(_ANY),
    "resources": {"limits": _Map(_QUANTITY), "requests": _Map(_QUANTITY)},
    "restartPolicy": _TEXT,
    "schedulerName": _TEXT,
    "schedulingGates": _List({"name": _TEXT}),
    "subdomain": _TEXT,
    "terminationGracePeriodSeconds": _COUNT,
    "tolerations": _List({"key": _TEXT}),
    "topologySpreadConstraints": _List(_ANY),
    "volumes": _List({
        "name": _TEXT,
        "persistentVolumeClaim": {"claimName": _TEXT},
        "ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": _TEXT}}},
    }),
}  # fmt: skip


def misshapen(spec: Any, place: str) -> Iterator[str]:
    """One line for each field whose type differs from the API's, the field first."""
    yield from _check(spec, _SPEC, place)


def without_nulls(value: Any, depth: int = 0) -> Any:
    """A copy without null fields, as the API server reads it.

    Raises `RecursionError` for values nested deeper than any pod.
    """
    if depth > _DEPTH_MAX:
        raise RecursionError(f"nested deeper than {_DEPTH_MAX} levels")
    if isinstance(value, dict):
        return {
            key: without_nulls(member, depth + 1)
            for key, member in value.items()
            if member is not None
        }
    if isinstance(value, list):
        return [without_nulls(item, depth + 1) for item in value]
    return value


def _check(value: Any, expected: Any, place: str) -> Iterator[str]:
    if value is None and not place.endswith("]"):
        return
    match expected:
        case _Scalar():
            is_flag = isinstance(value, bool)
            if not isinstance(value, expected.types) or (is_flag and bool not in expected.types):
                yield _refusal(place, value, expected.name)
        case _List() if isinstance(value, list):
            for index, item in enumerate(value):
                yield from _check(item, expected.of, f"{place}[{index}]")
        case _List():
            yield _refusal(place, value, "a list")
        case _ if not isinstance(value, dict):
            yield _refusal(place, value, "an object")
        case _Map():
            for key, item in value.items() if expected.of is not None else ():
                yield from _check(item, expected.of, f"{place}.{key}")
        case _:
            for key in [key for key in expected if key in value]:
                yield from _check(value[key], expected[key], f"{place}.{key}")


def _refusal(place: str, value: Any, expected: str) -> str:
    return f"{place}: is {_kind(value)}, expected {expected}"


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return f'the text "{value[:40]}"'
        case _:
            return f"the number {value!r:.40}"

"""Types and unknown fields of pods, checked with the official client's models."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

from fakekube.errors import ApiRefusal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["decode_pod", "type_errors", "unknown_fields"]

_QUANTITY: Final = re.compile(
    r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?"
)
# Maps of quantities, whose values may be numbers.
_QUANTITIES: Final = frozenset({"limits", "requests", "overhead", "capacity", "allocatable"})
_SCALARS: Final[dict[str, type]] = {"str": str, "bool": bool, "int": int, "datetime": str}


def decode_pod(value: Any, *, strict: bool) -> None:
    """Refuse (400) a value that cannot be decoded as a pod; `strict` refuses unknown fields."""
    prefix = 'Pod in version "v1" cannot be handled as a Pod: '
    if why := next(type_errors(value), ""):
        raise ApiRefusal(400, "BadRequest", prefix + why)
    unknown = ", ".join(
        f'unknown field "{unknown_field}"' for unknown_field in unknown_fields(value)
    )
    if strict and unknown:
        raise ApiRefusal(400, "BadRequest", f"{prefix}strict decoding error: {unknown}")


def unknown_fields(value: Any, kind: str = "V1Pod", place: str = "") -> Iterator[str]:
    """Paths of unknown fields, such as `spec.containers[0].comand`."""
    if match := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        for index, item in enumerate(value if isinstance(value, list) else ()):
            yield from unknown_fields(item, match[1], f"{place}[{index}]")
        return
    fields = _fields(kind)
    if fields is None or not isinstance(value, dict):
        return
    for name, item in value.items():
        path = f"{place}.{name}" if place else name
        if name not in fields:
            yield path
        else:
            yield from unknown_fields(item, fields[name], path)


def type_errors(value: Any, kind: str = "V1Pod", place: str = "") -> Iterator[str]:
    """Values whose type differs from their field's, with their paths. Nulls are ignored."""
    if value is None:
        return
    expected = _python_type(kind)
    if expected is None:
        return
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
        yield f"json: cannot unmarshal into Go struct field {place} of type {kind}"
        return
    for path, item, part in _parts(value, kind, place):
        yield from (
            _quantity_errors(item, path) if part == "quantity" else type_errors(item, part, path)
        )


def _python_type(kind: str) -> type | None:
    if kind.startswith(("List[", "list[")):
        return list
    if kind.startswith(("Dict(", "Dict[", "dict(")) or _fields(kind) is not None:
        return dict
    return _SCALARS.get(kind)


def _parts(value: Any, kind: str, place: str) -> Iterator[tuple[str, Any, str]]:
    """The members of a value: path, value, kind."""
    if match := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        for index, item in enumerate(value):
            yield f"{place}[{index}]", item, match[1]
    elif match := re.fullmatch(r"[dD]ict[\[(]str, (.+)[\])]", kind):
        quantities = place.rpartition(".")[2] in _QUANTITIES
        for name, item in value.items():
            yield f"{place}.{name}", item, "quantity" if quantities else match[1]
    elif fields := _fields(kind):
        for name, item in value.items():
            if name in fields:
                yield f"{place}.{name}" if place else name, item, fields[name]


def _quantity_errors(value: Any, place: str) -> Iterator[str]:
    text = value if isinstance(value, str) else str(value)
    if isinstance(value, bool | list | dict) or not _QUANTITY.fullmatch(text):
        yield f"{place}: quantities must match the regular expression '^([+-]?[0-9.]+)…$'"


@functools.cache
def _fields(kind: str) -> dict[str, str] | None:
    from kubernetes.client import models

    model = getattr(models, kind, None)
    if model is None:
        return None
    return {model.attribute_map[name]: of for name, of in model.openapi_types.items()}

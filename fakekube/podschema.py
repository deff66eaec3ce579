"""What a strict API server refuses in a pod: unknown fields, by the official client's models."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["unknown_fields"]


def unknown_fields(value: Any, kind: str = "V1Pod", place: str = "") -> Iterator[str]:
    """Their paths, such as `spec.containers[0].comand`."""
    if match := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        for index, one in enumerate(value if isinstance(value, list) else ()):
            yield from unknown_fields(one, match[1], f"{place}[{index}]")
        return
    fields = _fields(kind)
    if fields is None or not isinstance(value, dict):
        return
    for name, one in value.items():
        path = f"{place}.{name}" if place else name
        if name not in fields:
            yield path
        else:
            yield from unknown_fields(one, fields[name], path)


@functools.cache
def _fields(kind: str) -> dict[str, str] | None:
    from kubernetes.client import models

    model = getattr(models, kind, None)
    if model is None:
        return None
    return {model.attribute_map[name]: of for name, of in model.openapi_types.items()}

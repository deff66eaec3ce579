"""Label and field selectors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fakekube.errors import ApiRefusal

if TYPE_CHECKING:
    from collections.abc import Callable

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")


def selector(labels: str, fields: str) -> Callable[[dict[str, Any]], bool]:
    """A predicate over objects."""
    terms = [_label_term(term) for term in _split(labels)] + [
        _field_term(term) for term in _split(fields)
    ]
    return lambda value: all(term(value) for term in terms)


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    return [term.strip() for term in re.split(r",(?![^(]*\))", text) if term.strip()]


def _label_term(term: str) -> Callable[[dict[str, Any]], bool]:
    def labels(value: dict[str, Any]) -> dict[str, str]:
        return value["metadata"].get("labels") or {}

    match = _SET.match(term)
    if match:
        key, how, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        if how == "in":
            return lambda value: labels(value).get(key) in values
        return lambda value: labels(value).get(key) not in values
    for sign in ("!=", "==", "="):
        if sign in term:
            key, value = (part.strip() for part in term.split(sign, 1))
            equal = sign != "!="
            return lambda item: (labels(item).get(key) == value) is equal
    if term.startswith("!"):
        return lambda value: term[1:] not in labels(value)
    return lambda value: term in labels(value)


def _field_term(term: str) -> Callable[[dict[str, Any]], bool]:
    for sign in ("!=", "==", "="):
        if sign in term:
            path, value = term.split(sign, 1)
            equal = sign != "!="
            return lambda item: (_field(item, path) == value) is equal
    raise ApiRefusal(400, "BadRequest", f"invalid field selector {term!r}")


def _field(value: Any, path: str) -> str:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


__all__ = ["selector"]

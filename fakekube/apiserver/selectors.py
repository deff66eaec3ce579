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
    return lambda one: all(term(one) for term in terms)


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    return [term.strip() for term in re.split(r",(?![^(]*\))", text) if term.strip()]


def _label_term(term: str) -> Callable[[dict[str, Any]], bool]:
    def labels(one: dict[str, Any]) -> dict[str, str]:
        return one["metadata"].get("labels") or {}

    found = _SET.match(term)
    if found:
        key, how, listed = found.groups()
        values = {value.strip() for value in listed.split(",")}
        if how == "in":
            return lambda one: labels(one).get(key) in values
        return lambda one: labels(one).get(key) not in values
    for sign in ("!=", "==", "="):
        if sign in term:
            key, value = (part.strip() for part in term.split(sign, 1))
            wanted = sign != "!="
            return lambda one: (labels(one).get(key) == value) is wanted
    if term.startswith("!"):
        return lambda one: term[1:] not in labels(one)
    return lambda one: term in labels(one)


def _field_term(term: str) -> Callable[[dict[str, Any]], bool]:
    for sign in ("!=", "==", "="):
        if sign in term:
            path, value = term.split(sign, 1)
            wanted = sign != "!="
            return lambda one: (_field(one, path) == value) is wanted
    raise ApiRefusal(400, "BadRequest", f"invalid field selector {term!r}")


def _field(one: Any, path: str) -> str:
    for part in path.split("."):
        one = one.get(part) if isinstance(one, dict) else None
    return "" if one is None else str(one)


__all__ = ["selector"]

"""CEL rules of the models: what the API server refuses, and with which message.

A rule's message names field, value and remedy. `message` is the text without the value, for servers
that could not compute `message_expression`, the CEL expression of the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of x-kubernetes-validations."""

    rule: str
    message: str
    message_expression: str = ""  # a CEL expression that yields the message with its values
    field: str = ""  # the field the error points at, relative to the object the rule is on

    def to_schema(self) -> dict[str, Any]:
        """The form in which a CRD has it."""
        entry: dict[str, Any] = {"rule": self.rule, "message": self.message}
        if self.message_expression:
            entry["messageExpression"] = self.message_expression
        if self.field:
            entry["fieldPath"] = self.field
        return entry


def message_expression(template: str, *values: str) -> str:
    """The expression of a message: `%d` and `%s` are replaced by the values of the CEL expressions.

    A format costs the same whatever it is given; joined strings cost by the longest that could be,
    which the API server refuses when a number is among them.
    """
    text = template.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'.format([{', '.join(f'dyn({value})' for value in values)}])"


def rules(*matches: Rule) -> dict[str, Any]:
    """The json_schema_extra of a model or of a field with these rules."""
    return {"x-kubernetes-validations": [match.to_schema() for match in matches]}


def list_map(*keys: str) -> dict[str, Any]:
    """A list whose items server-side apply merges by these keys."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def list_set() -> dict[str, Any]:
    """A list of scalars without duplicates, merged item by item."""
    return {"x-kubernetes-list-type": "set"}


def atomic_map() -> dict[str, Any]:
    """An object that has one owner: the API server keeps no account of who wrote which field.

    That account is as large as the object, and is read, merged and written with every change.
    """
    return {"x-kubernetes-map-type": "atomic"}


__all__ = ["Rule", "atomic_map", "list_map", "list_set", "message_expression", "rules"]

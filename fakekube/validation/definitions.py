"""Fire-Flyer's CRDs as the API server enforces them: pruning, defaults, schema, CEL rules."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyer.api import GROUP, crd

from fakekube.errors import ApiRefusal, invalid
from fakekube.validation.cel import Expression, Failure, Values, escaped
from fakekube.validation.structural import apply_defaults, correlated, prune, schema_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Definition", "definition_of"]

_NOT_CHECKED = (
    '<nil>: Invalid value: "": some validation rules were not checked because the object was '
    "invalid; correct the existing errors to complete validation"
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One entry of x-kubernetes-validations."""

    expression: Expression
    message: str
    computed: Expression | None
    field_path: str
    transition: bool  # compares with oldSelf: evaluated only for updates

    @classmethod
    def of(cls, entry: dict[str, str]) -> _Rule:
        computed = entry.get("messageExpression")
        return cls(
            Expression(entry["rule"]),
            entry["message"],
            Expression(computed) if computed else None,
            entry.get("fieldPath", ""),
            bool(re.search(r"\boldSelf\b", entry["rule"])),
        )

    def error(self, values: Values, path: str, value_text: str) -> str:
        """The API server's message for a value that violates the rule; empty: it holds."""
        try:
            if self.expression(values) is True:
                return ""
            message = self.message
            if self.computed is not None:
                with contextlib.suppress(Failure):
                    message = self.computed(values)
        except Failure as failure:
            message = f"rule evaluation error: {failure}: {self.message}"
        place = f"{path}{self.field_path}" if path else self.field_path.removeprefix(".")
        return f"{place or '<nil>'}: Invalid value: {value_text}: {message}"


@dataclass(frozen=True, slots=True)
class _Node:
    """The rules of a part of a schema and of its members; parts without rules are omitted."""

    schema: dict[str, Any]
    rules: tuple[_Rule, ...]
    properties: dict[str, _Node] = field(default_factory=dict)
    items: _Node | None = None
    extra: _Node | None = None

    @classmethod
    def of(cls, schema: dict[str, Any]) -> _Node | None:
        rules = tuple(_Rule.of(rule) for rule in schema.get("x-kubernetes-validations") or ())
        properties = {
            name: node
            for name, part in (schema.get("properties") or {}).items()
            if (node := cls.of(part)) is not None
        }
        items, extra = schema.get("items"), schema.get("additionalProperties")
        below = [cls.of(part) if isinstance(part, dict) else None for part in (items, extra)]
        if not rules and not properties and below == [None, None]:
            return None
        return cls(schema, rules, properties, *below)

    def errors(self, value: Any, old: Any, path: str = "") -> Iterator[str]:
        """Errors of a value that matches the schema. `old` is None for a new value."""
        if value is None:
            return
        yield from self._own(value, old, path)
        if isinstance(value, dict):
            before = old if isinstance(old, dict) else {}
            for name, item in value.items():
                node = self.properties.get(name) or self.extra
                if node is not None:
                    place = f"{path}.{name}" if path else name
                    yield from node.errors(item, before.get(name), place)
        elif isinstance(value, list) and self.items is not None:
            for index, item in enumerate(value):
                before = correlated(item, old, self.schema)
                old_items = before if isinstance(before, dict) else None
                yield from self.items.errors(item, old_items, f"{path}[{index}]")

    def _own(self, value: Any, old: Any, path: str) -> Iterator[str]:
        unchanged = old is not None and value == old
        rules = [
            item for item in self.rules if (old is not None if item.transition else not unchanged)
        ]
        if not rules:
            return
        before = None if old is None else escaped(old, self.schema)
        values = Values({"self": escaped(value, self.schema), "oldSelf": before})
        value_text = '"object"' if isinstance(value, dict) else json.dumps(value)
        for rule in rules:
            if error := rule.error(values, path, value_text):
                yield error


class Definition:
    """One CRD, compiled."""

    def __init__(self, kind: crd.Kind) -> None:
        spec = crd.crd(kind)["spec"]
        self.plural: str = spec["names"]["plural"]
        self._name = f"{kind.kind}.{spec['group']}"
        self._schema: dict[str, Any] = spec["versions"][0]["schema"]["openAPIV3Schema"]
        self._rules = _Node.of(self._schema)

    def prune(self, value: dict[str, Any], *, strict: bool = False) -> None:
        """Remove unknown fields, in place; `strict` refuses them."""
        unknown = list(prune(value, self._schema))
        if strict and unknown:
            listed = ", ".join(f'unknown field "{item}"' for item in unknown)
            raise ApiRefusal(400, "BadRequest", f"strict decoding error: {listed}")

    def complete(self, value: dict[str, Any]) -> None:
        """Add defaults, in place."""
        apply_defaults(value, self._schema)

    def check(self, value: dict[str, Any], old: dict[str, Any] | None) -> None:
        """Refuse an object that violates its schema or a rule."""
        name = value["metadata"]["name"]
        old_body = () if old is None else (_body(old),)
        errors = list(schema_errors(_body(value), self._schema, "", *old_body))
        if errors:
            errors.append(_NOT_CHECKED)
        elif self._rules is not None:
            before = None if old is None else _visible_metadata(old)
            errors = list(self._rules.errors(_visible_metadata(value), before))
        if errors:
            why = errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]"
            raise invalid(self._name, name, why)


def _body(value: dict[str, Any]) -> dict[str, Any]:
    """The object without metadata, which is validated separately."""
    return {name: item for name, item in value.items() if name != "metadata"}


def _visible_metadata(value: dict[str, Any]) -> dict[str, Any]:
    """The object as rules see it: only the name in its metadata."""
    metadata = {
        name: item for name, item in value["metadata"].items() if name in ("name", "generateName")
    }
    return {**value, "metadata": metadata}


@functools.cache
def _definitions() -> dict[str, Definition]:
    return {
        definition.plural: definition for definition in (Definition(kind) for kind in crd.KINDS)
    }


def definition_of(plural: str, group: str) -> Definition | None:
    """The definition of one of Fire-Flyer's kinds; None for others."""
    return _definitions().get(plural) if group == GROUP else None

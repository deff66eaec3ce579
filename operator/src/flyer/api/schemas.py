"""Structural schemas of models: every value has a type, and schemas contain no references.

Null means absent, with one exception: an optional field whose default is not null is nullable: null
means "none", and absence means "the default".
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

# Keywords that a structural schema may have, apart from those of nested schemas.
_KEPT = (
    "type", "format", "description", "default", "enum", "pattern", "nullable",
    "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
    "x-kubernetes-validations",
)  # fmt: skip


def structural_schema(model: type[BaseModel], *, mode: Any = "validation") -> dict[str, Any]:
    """The schema of a model as a structural schema of Kubernetes."""
    schema = model.model_json_schema(by_alias=True, mode=mode)
    return _structural(schema, schema.get("$defs", {}))


def _structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        return _structural(
            {**target, **{k: v for k, v in schema.items() if k != "$ref"}}, definitions
        )
    if "anyOf" in schema:
        # An optional value: in an object, null is represented by absence.
        options = [option for option in schema["anyOf"] if option.get("type") != "null"]
        assert len(options) == 1, f"not a structural schema: {schema}"
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        if rest.get("default") is None:
            rest.pop("default", None)
        else:
            rest["nullable"] = True
        return _structural({**options[0], **rest}, definitions)
    if "const" in schema:
        return {"type": "string", "enum": [schema["const"]]}
    copied = {key: copy.deepcopy(schema[key]) for key in _KEPT if schema.get(key) is not None}
    if "description" in copied:
        # Only the first paragraph of a docstring, to keep `kubectl explain` short.
        copied["description"] = " ".join(copied["description"].split("\n\n")[0].split())
    if "default" in copied:
        copied["default"] = _without_nulls(copied["default"])
    if "enum" in copied:
        copied.setdefault("type", "integer" if isinstance(copied["enum"][0], int) else "string")
    if copied.get("type") == "integer":
        copied["format"] = "int64"
    return {**copied, **_parts(schema, definitions)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _parts(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The members of a list, a map or an object."""
    parts: dict[str, Any] = {}
    if "items" in schema:
        parts["items"] = _structural(schema["items"], definitions)
    if "properties" in schema:
        parts["properties"] = {
            name: _structural(property_schema, definitions)
            for name, property_schema in schema["properties"].items()
        }
        if schema.get("required"):
            parts["required"] = schema["required"]
    extra = schema.get("additionalProperties")
    if extra is True:
        parts["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(extra, dict):
        parts["additionalProperties"] = _structural(extra, definitions)
    return parts


__all__ = ["structural_schema"]

"""Structural schemas of CRDs: pruning, defaults and validation, as kube-apiserver does them.

Messages equal the API server's, so that a test can run against both. Updates are validated with
ratcheting: unchanged parts are not validated again.
"""

from __future__ import annotations

import copy
import datetime as dt
import functools
import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["apply_defaults", "as_decoded", "correlated", "is_type", "prune", "schema_errors"]

Schema = dict[str, Any]

_INT64_MAX: Final = 2**63 - 1
_MISSING: Final = object()
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"


def as_decoded(value: Any) -> Any:
    """The value after Go's JSON decoder and encoder: 1.0 is 1, a lone surrogate is U+FFFD."""
    if isinstance(value, dict):
        return {_as_text(name): as_decoded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_decoded(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return _as_text(value) if isinstance(value, str) else value


def _as_text(text: str) -> str:
    return text if text.isprintable() else _SURROGATES.sub("\ufffd", text)


def prune(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """Remove fields that the schema does not name, in place; yields the path of each."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from prune(item, schema.get("items") or {}, f"{path}[{index}]")
        return
    if not isinstance(value, dict):
        return
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    for name in list(value):
        if not path and name in ("apiVersion", "kind", "metadata"):
            continue
        place = f"{path}.{name}" if path else name
        if name in properties:
            yield from prune(value[name], properties[name], place)
        elif isinstance(extra, dict):
            yield from prune(value[name], extra, place)
        elif not schema.get(_PRESERVE) and (properties or schema.get("type") == "object"):
            del value[name]
            yield place


def apply_defaults(value: Any, schema: Schema) -> None:
    """Add defaults, in place; an invalid null counts as absent if there is a default."""
    if isinstance(value, list):
        for item in value:
            apply_defaults(item, schema.get("items") or {})
        return
    if not isinstance(value, dict):
        return
    for name, part in (schema.get("properties") or {}).items():
        if "default" in part and (
            name not in value or (value[name] is None and not part.get("nullable"))
        ):
            value[name] = copy.deepcopy(part["default"])
        if name in value:
            apply_defaults(value[name], part)
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        for entry in value.values():
            apply_defaults(entry, extra)


def schema_errors(value: Any, schema: Schema, path: str = "", old: Any = _MISSING) -> Iterator[str]:
    """Schema errors, each as `FIELD: REASON`; `old` is the stored value of an update."""
    if old is not _MISSING and value == old:
        return
    if value is None and (schema.get("nullable") or "type" not in schema):
        return
    expected = schema.get("type")
    if expected and not is_type(value, expected):
        kind = _kind_of(value)
        reason = f'in body must be of type {expected}: "{kind}"'
        yield f'{path}: Invalid value: "{kind}": {path} {reason}'
        return
    if "enum" in schema and value not in schema["enum"]:
        listed = ", ".join(json.dumps(item) for item in schema["enum"])
        yield f"{path}: Unsupported value: {json.dumps(value)}: supported values: {listed}"
    if isinstance(value, str):
        yield from _text_errors(value, schema, path)
    elif isinstance(value, list):
        yield from _list_errors(value, schema, path, old)
    elif isinstance(value, dict):
        yield from _object_errors(value, schema, path, old)
    elif not isinstance(value, bool):
        yield from _number_errors(value, schema, path)


def _text_errors(value: str, schema: Schema, path: str) -> Iterator[str]:
    limit = schema.get("maxLength")
    if limit is not None and len(value) > limit:
        yield f"{path}: Too long: may not be more than {limit} bytes"
    if len(value) < schema.get("minLength", 0):
        why = f"should be at least {schema['minLength']} chars long"
        yield f"{path}: Invalid value: {json.dumps(value)}: {path} in body {why}"
    pattern = schema.get("pattern")
    if pattern and not _compiled(pattern).search(value):
        text = json.dumps(value)
        yield f"{path}: Invalid value: {text}: {path} in body should match '{pattern}'"
    if schema.get("format") == "date-time" and not _is_date_time(value):
        text = json.dumps(value)
        yield f"{path}: Invalid value: {text}: {path} in body must be of type date-time: {text}"


def _number_errors(value: float, schema: Schema, path: str) -> Iterator[str]:
    body = f"{path}: Invalid value: {json.dumps(value)}: {path} in body should be"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{body} greater than or equal to {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{body} less than or equal to {schema['maximum']}"


def _list_errors(value: list[Any], schema: Schema, path: str, old: Any) -> Iterator[str]:
    limit = schema.get("maxItems")
    if limit is not None and len(value) > limit:
        yield f"{path}: Too many: {len(value)}: must have at most {limit} items"
    if len(value) < schema.get("minItems", 0):
        least = schema["minItems"]
        yield (
            f"{path}: Invalid value: {len(value)}: {path} in body should have at least {least} "
            "items"
        )
    keys: list[Any] = []
    for index, item in enumerate(value):
        place = f"{path}[{index}]"
        yield from schema_errors(
            item, schema.get("items") or {}, place, correlated(item, old, schema)
        )
        key = _key_of(item, schema)
        if key is not None and key in keys:
            yield f"{place}: Duplicate value: {json.dumps(key)}"
        keys.append(key)


def _key_of(item: Any, schema: Schema) -> Any:
    """The key that must be unique in a list of type set or map; None: no constraint."""
    kind = schema.get("x-kubernetes-list-type")
    if kind == "set":
        return item
    if kind == "map" and isinstance(item, dict):
        return {name: item.get(name) for name in schema["x-kubernetes-list-map-keys"]}
    return None


def correlated(item: Any, old: Any, schema: Schema) -> Any:
    """The stored item that corresponds to this list item, or a marker for none."""
    if schema.get("x-kubernetes-list-type") != "map" or not isinstance(old, list):
        return _MISSING
    key = _key_of(item, schema)
    return next(
        (entry for entry in old if key is not None and _key_of(entry, schema) == key), _MISSING
    )


def _object_errors(value: dict[str, Any], schema: Schema, path: str, old: Any) -> Iterator[str]:
    before = old if isinstance(old, dict) else {}
    dot = f"{path}." if path else ""
    for name in schema.get("required") or ():
        if name not in value:
            yield f"{dot}{name}: Required value"
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    for name, item in value.items():
        part = properties.get(name) or (extra if isinstance(extra, dict) else None)
        if part is not None:
            yield from schema_errors(item, part, f"{dot}{name}", before.get(name, _MISSING))


def is_type(value: Any, expected: str) -> bool:
    """Whether a JSON value is of a schema's type."""
    if isinstance(value, bool) or expected == "boolean":
        return isinstance(value, bool) and expected == "boolean"
    if expected == "integer":
        if isinstance(value, float):
            return value.is_integer() and abs(value) <= 2**53
        return isinstance(value, int) and -_INT64_MAX - 1 <= value <= _INT64_MAX
    kinds = {"string": str, "number": int | float, "array": list, "object": dict}
    return isinstance(value, kinds[expected])


def _kind_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"),
                       (list, "array"), (dict, "object")):  # fmt: skip
        if isinstance(value, kind):
            return name
    return "null"


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as RE2 reads it: `$` does not match before a final newline."""
    return re.compile(re.sub(r"(?<!\\)\$$", r"\\Z", pattern), re.ASCII)


def _is_date_time(value: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", value):
        return False
    try:
        dt.datetime.fromisoformat(re.sub(r"\.\d+", "", value.upper()))
    except ValueError:
        return False
    return True

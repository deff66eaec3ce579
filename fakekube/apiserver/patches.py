"""Patch formats of the Kubernetes API, as far as tests need them. Pure functions."""

from __future__ import annotations

import copy
import json
from typing import Any

from fakekube.errors import ApiRefusal

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
STRATEGIC = "application/strategic-merge-patch+json"

# Keys by which strategic merge and server-side apply merge lists of maps.
_LIST_KEYS = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "taints": "key",
    "ownerReferences": "uid",
    "schedulingGates": "name",
}


def merge(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic(target: Any, patch: Any, field: str = "") -> Any:
    """Strategic merge: well-known lists of maps are merged by their keys."""
    if isinstance(patch, list):
        key = _LIST_KEYS.get(field)
        if key is None or not all(isinstance(item, dict) for item in patch):
            return copy.deepcopy(patch)
        return _by_key(target if isinstance(target, list) else [], patch, key)
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = strategic(result.get(name), value, name)
    return result


def _by_key(target: list[Any], patch: list[Any], key: str) -> list[Any]:
    result = {item.get(key): item for item in target}
    for item in patch:
        if item.get("$patch") == "delete":
            result.pop(item.get(key), None)
        else:
            result[item.get(key)] = strategic(result.get(item.get(key)), item)
    return list(result.values())


def json_patch(target: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902: add, remove, replace, test. As the API server: a test for null accepts no value."""
    document = copy.deepcopy(target)
    for operation in operations:
        kind, path = operation["op"], operation["path"]
        parts = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
        if not parts:
            raise ApiRefusal(422, "Invalid", f"the json patch path {path!r} names the whole object")
        holder = document
        try:
            for part in parts[:-1]:
                holder = holder[int(part)] if isinstance(holder, list) else holder[part]
            _operate(holder, parts[-1], kind, operation.get("value"))
        except (KeyError, IndexError, ValueError, TypeError) as error:
            why = f"the server rejected our request due to an error in our request: {kind} {path}"
            raise ApiRefusal(422, "Invalid", why) from error
    return document


def _operate(holder: Any, last: str, kind: str, value: Any) -> None:
    if isinstance(holder, list):
        index = len(holder) if last == "-" else int(last)
        if kind == "add":
            holder.insert(index, value)
        elif kind == "remove":
            del holder[index]
        elif kind == "replace":
            holder[index] = value
        elif kind == "test":
            _test(holder[index], value)
        return
    if kind in ("remove", "replace") and last not in holder:
        raise KeyError(last)
    if kind == "remove":
        del holder[last]
    elif kind == "test":
        _test(holder.get(last), value)
    else:
        holder[last] = value


def _test(found: Any, expected: Any) -> None:
    """As the API server: texts are equal if Go and the client write them with the same bytes."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        for key, value in expected.items():
            _test(found[key], value)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for pair in zip(found, expected, strict=True):
            _test(*pair)
    elif found != expected or _as_go(found) != json.dumps(expected):
        raise ValueError("test failed")


def _as_go(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def apply(target: Any, configuration: dict[str, Any], before: dict[str, Any] | None) -> Any:
    """Server-side apply: fields that the manager applied before and omits now are removed."""
    result = _without(target, before, configuration) if before else target
    return strategic(result, configuration)


def _without(target: Any, before: Any, now: Any) -> Any:
    if not isinstance(target, dict) or not isinstance(before, dict):
        return target
    result = dict(target)
    for key, value in before.items():
        if key not in result or key in ("apiVersion", "kind", "metadata"):
            continue
        if not isinstance(now, dict) or key not in now:
            if isinstance(value, dict) and value:
                result[key] = _without(result[key], value, None)
                if not result[key]:
                    del result[key]
            else:
                del result[key]
        else:
            result[key] = _without(result[key], value, now[key])
    return result


def without_version(patch: dict[str, Any]) -> dict[str, Any]:
    """The patch without its preconditions."""
    metadata = patch.get("metadata")
    if not isinstance(metadata, dict):
        return patch
    changed_metadata = {
        name: item for name, item in metadata.items() if name not in ("resourceVersion", "uid")
    }
    return {**patch, "metadata": changed_metadata}


__all__ = [
    "APPLY",
    "JSON",
    "MERGE",
    "STRATEGIC",
    "apply",
    "json_patch",
    "merge",
    "strategic",
    "without_version",
]

"""`python -m flyer.api.reference`: write docs/reference/api.md from the models.

The page has the contents of `kubectl explain` (every field with its type, default and bounds) and
the message of every validation rule.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyer.api import names
from flyer.api.crd import KINDS, crd
from flyer.api.policies import admission_policies

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flyer.api.crd import Kind

__all__ = ["page"]

_HEAD = f"""# API reference: {names.API_VERSION}

Generated from the models in `operator/src/flyer/api` by `python -m flyer.api.reference`. Times are
RFC 3339 in UTC; durations are texts with units such as `30m`, `24h` or `1h30m`. The sections on
rules list what the API server rejects in addition to wrong types, with its messages (`…`: a value).
"""

_KEYS = (
    (names.USER_ANNOTATION, "user who created the job; set by an admission policy"),
    (
        names.CHANGED_BY_ANNOTATION,
        "user who last changed suspend, stop, priority or requeue; set by an admission policy",
    ),
    (names.REASON_ANNOTATION, "reason of that change, in free text"),
    (
        names.REQUEUE_ANNOTATION,
        "number of the attempt to checkpoint, release its nodes and queue again immediately",
    ),
    (names.QUEUE_LABEL, "label; name of the queue in Kueue, used if `spec.queue` is absent"),
)


def page() -> str:
    """The text of the page."""
    parts = [_HEAD, *(_kind(kind) for kind in KINDS), _annotations(), _policies()]
    return "\n".join(parts)


def _kind(kind: Kind) -> str:
    definition = crd(kind)["spec"]
    root = definition["versions"][0]["schema"]["openAPIV3Schema"]
    scope = "in a namespace" if definition["scope"] == "Namespaced" else "of the whole cluster"
    lines = [
        f"## {kind.kind}",
        "",
        f"{root['description']} Short name `{kind.short}`, {scope}.",
        "",
    ]
    for part in ("spec", "status"):
        lines += [f"### {kind.kind} {part}", "", root["properties"][part]["description"], ""]
        lines += ["| field | type | default | what |", "|---|---|---|---|"]
        lines += [_row(*field) for field in _fields(root["properties"][part], part)]
        lines.append("")
    matches = list(_rules(root))
    if matches:
        lines += [f"### {kind.kind} rules", "", *(f"- {_message(match)}" for match in matches), ""]
    return "\n".join(lines)


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    required = schema.get("required", [])
    for name, part in schema.get("properties", {}).items():
        place = f"{path}.{name}"
        yield place, part, name in required
        inner = part
        while "items" in inner:
            inner, place = inner["items"], f"{place}[]"
        yield from _fields(inner, place)


def _row(path: str, schema: dict[str, Any], required: bool) -> str:  # noqa: FBT001
    default = "required" if required else _default(schema)
    description = schema.get("description", "").replace("|", "\\|")
    bounds = _bounds(schema)
    return f"| `{path}` | {_type(schema)} | {default} | {description}{bounds} |"


def _type(schema: dict[str, Any]) -> str:
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    if schema.get("format") == "date-time":
        return "time"
    if kind == "object" and "additionalProperties" in schema:
        return f"map of {_type(schema['additionalProperties'])}"
    return f"{kind} or null" if schema.get("nullable") else kind


def _default(schema: dict[str, Any]) -> str:
    if "default" not in schema or schema["default"] in ({}, [], ""):
        return ""
    if isinstance(schema["default"], dict):
        return "as its fields"
    return f"`{json.dumps(schema['default'])}`"


def _bounds(schema: dict[str, Any]) -> str:
    bounds = []
    if "enum" in schema:
        bounds.append("one of " + ", ".join(f"`{value}`" for value in schema["enum"]))
    if "minimum" in schema and "maximum" in schema:
        bounds.append(f"{schema['minimum']} to {schema['maximum']}")
    elif "minimum" in schema and schema["minimum"] > 0:
        bounds.append(f"{schema['minimum']} or more")
    if "maxItems" in schema:
        bounds.append(f"at most {schema['maxItems']}")
    return f" ({'; '.join(bounds)})" if bounds else ""


def _rules(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from schema.get("x-kubernetes-validations", [])
    for part in schema.get("properties", {}).values():
        yield from _rules(part)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from _rules(schema[name])


def _message(rule: dict[str, Any]) -> str:
    expression = rule.get("messageExpression", "")
    text = str(rule["message"])
    if expression.startswith("'") and "'.format([" in expression:
        text = expression[1:].split("'.format([")[0].replace("\\'", "'")
    return text.replace("%d", "…").replace("%s", "…").replace("|", "\\|")


def _annotations() -> str:
    rows = [f"| `{key}` | {description} |" for key, description in _KEYS]
    return "\n".join(["## Annotations and labels", "", "| key | meaning |", "|---|---|", *rows, ""])


def _policies() -> str:
    lines = [
        "## Admission policies",
        "",
        "`crds/policies/admission.yaml`; the chart installs them with its own names.",
        "",
        "| policy | what it is about | operations |",
        "|---|---|---|",
    ]
    for policy in admission_policies():
        if "matchConstraints" not in policy["spec"]:
            continue  # a binding
        (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
        resources = ", ".join(f"`{resource}`" for resource in rule["resources"])
        operations = ", ".join(operation.lower() for operation in rule["operations"])
        lines.append(f"| `{policy['metadata']['name']}` | {resources} | {operations} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or report that it differs with --check."""
    parser = argparse.ArgumentParser(prog="python -m flyer.api.reference", description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("docs/reference/api.md"))
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args(arguments)
    text = page()
    if options.file.exists() and options.file.read_text() == text:
        return 0
    if options.check:
        sys.stderr.write(f"not up to date: {options.file}; run python -m flyer.api.reference\n")
        return 1
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

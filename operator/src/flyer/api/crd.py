"""`python -m flyer.api.crd`: write `crds/` from the models.

A CRD's schema is structural: every value has a type, nothing is referenced, nothing is null.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from flyer.api.flyerjob import FlyerJobSpec
from flyer.api.names import GROUP, KIND_JOB, VERSION
from flyer.api.status import FlyerJobStatus

if TYPE_CHECKING:
    from pydantic import BaseModel

_HEADER = "# Generated from the models in operator/src/flyer/api by `python -m flyer.api.crd`.\n"
# What a structural schema may say of a value, apart from its parts.
_KEPT = (
    "type", "format", "description", "default", "enum", "pattern",
    "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
)  # fmt: skip

_COLUMNS = (
    # name, type, path, shown with -o wide alone
    ("State", "string", ".status.phase", False),
    ("Reason", "string", ".status.reason", False),
    ("Nodes", "integer", ".spec.nodes", False),
    ("Zone", "string", ".status.zones", False),
    ("Priority", "string", ".spec.priority", False),
    ("Progress", "integer", ".status.progress.step", False),
    ("Restarts", "integer", ".status.chain.restarts", False),
    ("Age", "date", ".metadata.creationTimestamp", False),
    ("ETA", "string", ".status.pending.eta", True),
    ("Last-Ckpt", "date", ".status.checkpoint.time", True),
    ("Queue", "string", ".spec.queue", True),
)


def flyerjob_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of FlyerJob."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"flyerjobs.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND_JOB,
                "listKind": f"{KIND_JOB}List",
                "plural": "flyerjobs",
                "singular": "flyerjob",
                "shortNames": ["fj"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(*one) for one in _COLUMNS],
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": "Whole nodes, all or nothing, shared over time.",
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": structural_schema(FlyerJobSpec, mode="validation"),
                                "status": structural_schema(FlyerJobStatus, mode="validation"),
                            },
                        }
                    },
                }
            ],
        },
    }


def structural_schema(model: type[BaseModel], *, mode: Any) -> dict[str, Any]:
    """The schema of a model as Kubernetes takes it."""
    schema = model.model_json_schema(by_alias=True, mode=mode)
    return _structural(schema, schema.get("$defs", {}))


def _column(name: str, kind: str, path: str, wide: bool) -> dict[str, Any]:  # noqa: FBT001
    column = {"name": name.upper(), "type": kind, "jsonPath": path}
    return {**column, "priority": 1} if wide else column


def _structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        return _structural(
            {**target, **{k: v for k, v in schema.items() if k != "$ref"}}, definitions
        )
    if "anyOf" in schema:
        # An optional value: absent is how an object says null.
        options = [one for one in schema["anyOf"] if one.get("type") != "null"]
        assert len(options) == 1, f"not a structural schema: {schema}"
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
        return _structural({**options[0], **rest}, definitions)
    if "const" in schema:
        return {"type": "string", "enum": [schema["const"]]}
    kept = {key: schema[key] for key in _KEPT if schema.get(key) is not None}
    if "description" in kept:
        # The first sentence of a docstring: kubectl explain has no room for more.
        kept["description"] = " ".join(kept["description"].split("\n\n")[0].split())
    if "enum" in kept:
        kept.setdefault("type", "integer" if isinstance(kept["enum"][0], int) else "string")
    if kept.get("type") == "integer":
        kept["format"] = "int64"
    return {**kept, **_parts(schema, definitions)}


def _parts(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The members of a list, a map or an object."""
    parts: dict[str, Any] = {}
    if "items" in schema:
        parts["items"] = _structural(schema["items"], definitions)
        item_names = parts["items"].get("properties", {})
        if {"type", "lastTransitionTime"} <= item_names.keys():
            parts["x-kubernetes-list-type"] = "map"
            parts["x-kubernetes-list-map-keys"] = ["type"]
    if "properties" in schema:
        parts["properties"] = {
            name: _structural(one, definitions) for name, one in schema["properties"].items()
        }
        if schema.get("required"):
            parts["required"] = schema["required"]
    extra = schema.get("additionalProperties")
    if extra is True:
        parts["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(extra, dict):
        parts["additionalProperties"] = _structural(extra, definitions)
    return parts


def to_yaml(document: dict[str, Any]) -> str:
    """The same text for the same document."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(document, text)
    return _HEADER + text.getvalue()


def files() -> dict[str, str]:
    """Every generated file by name."""
    return {f"flyerjobs.{GROUP}.yaml": to_yaml(flyerjob_crd())}


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with --check say which differ."""
    parser = argparse.ArgumentParser(prog="python -m flyer.api.crd", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("crds"))
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args(arguments)
    stale = []
    for name, text in files().items():
        path = options.folder / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(str(path))
        if not options.check:
            options.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if options.check and stale:
        sys.stderr.write(f"not up to date: {', '.join(stale)}; run python -m flyer.api.crd\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

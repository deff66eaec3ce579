"""CRDs: generated from the models, and structural schemas with full descriptions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerJobSpec, FlyerJobStatus, crd

if TYPE_CHECKING:
    from collections.abc import Iterator

CRDS = Path(__file__).parents[3] / "crds"


def test_the_committed_files_are_the_generated_ones() -> None:
    for name, text in crd.files().items():
        assert (CRDS / name).read_text() == text, "run python -m flyer.api.crd"
    assert {str(path.relative_to(CRDS)) for path in CRDS.rglob("*.yaml")} == set(crd.files())


def version() -> dict[str, Any]:
    (crd_version,) = crd.crd(crd.KINDS[0])["spec"]["versions"]
    return crd_version


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from schemas(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from schemas(schema[name], f"{path}[]")


def test_every_value_has_a_type_and_nothing_is_referenced() -> None:
    for path, schema in schemas(version()["schema"]["openAPIV3Schema"]):
        typed = "type" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
        assert typed, path
        assert schema.keys().isdisjoint({"$ref", "anyOf", "allOf", "oneOf", "const", "title"}), path
        assert not {"properties", "additionalProperties"} <= schema.keys(), path


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in schema.get("properties", {}).items():
        yield f"{path}.{name}", part
        yield from fields(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from fields(schema[name], f"{path}[]")


@pytest.mark.parametrize("kind", crd.KINDS, ids=[kind.kind for kind in crd.KINDS])
def test_every_description_is_a_sentence(kind: crd.Kind) -> None:
    """`kubectl explain` shows one field, without its neighbours and without the code."""
    (served,) = crd.crd(kind)["spec"]["versions"]
    root = served["schema"]["openAPIV3Schema"]
    for path, schema in [(kind.kind, root), *fields(root, kind.kind)]:
        if path == f"{kind.kind}.metadata":
            assert "description" not in schema  # the API server accepts none
            continue
        description = schema.get("description", "")
        assert re.match(r"[A-Z]", description), (path, description)
        assert description.endswith("."), (path, description)
        assert len(description.split()) >= 4, (path, description)


def test_the_schema_names_what_the_models_name() -> None:
    properties = version()["schema"]["openAPIV3Schema"]["properties"]
    for name, model in (("spec", FlyerJobSpec), ("status", FlyerJobStatus)):
        fields = {field.alias for field in model.model_fields.values()}
        assert set(properties[name]["properties"]) == fields
    assert properties["spec"]["required"] == ["nodes", "template"]
    assert properties["spec"]["properties"]["preemption"]["default"] == {
        "checkpointGracePeriod": "1m", "maxCheckpointGracePeriod": "10m", "minRuntime": "15m",
    }  # fmt: skip


def test_printer_columns_read_existing_scalars() -> None:
    properties = version()["schema"]["openAPIV3Schema"]["properties"]
    names = []
    for column in version()["additionalPrinterColumns"]:
        names.append(column["name"])
        schema: dict[str, Any] = {"properties": properties}
        for part in column["jsonPath"].strip(".").split("."):
            if part == "metadata":
                break
            schema = schema["properties"][part]
        else:
            assert schema["type"] in ("string", "integer"), column
    assert names == [
        "STATE", "REASON", "NODES", "ZONE", "PRIORITY", "PROGRESS", "RESTARTS", "AGE",
        "ETA", "LAST-CKPT", "QUEUE",
    ]  # fmt: skip


def test_names() -> None:
    spec = crd.crd(crd.KINDS[0])["spec"]
    assert spec["names"]["shortNames"] == ["fj"]
    assert version()["subresources"] == {"status": {}}


def test_check_reports_stale_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--folder", str(tmp_path), "--check"]) == 1
    errors = capsys.readouterr().err
    assert "flyerjobs.fireflyer.dev.yaml" in errors
    assert "run python -m flyer.api.crd" in errors
    assert crd.main(["--folder", str(tmp_path)]) == 0
    assert crd.main(["--folder", str(tmp_path), "--check"]) == 0

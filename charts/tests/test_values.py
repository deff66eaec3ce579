"""Chart values: each is described, has a default, is used, and is validated by Helm."""

import json
import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from charts import generate
from charts.tests.conftest import CHART, template

SOURCE = YAML(typ="safe").load(generate.SOURCE)
ROWS = list(generate.rows(SOURCE))
KEYWORDS = {
    "$ref", "$schema", "additionalProperties", "default", "definitions", "description", "enum",
    "items", "maximum", "maxLength", "minLength", "minimum", "pattern", "properties", "title",
    "type",
}  # fmt: skip


@pytest.mark.parametrize("path", generate.generated(), ids=lambda path: path.name)
def test_generated_files_are_fresh(path: Any) -> None:
    assert path.read_text() == generate.generated()[path], "run `python -m charts.generate`"


def test_every_value_is_described() -> None:
    assert len(ROWS) > 100
    for path, _, description in ROWS:
        assert len(description) > 3, path
        assert not description.endswith("."), path


def test_the_source_uses_only_known_keywords() -> None:
    """A comma in an unquoted description would silently start a new key."""

    def walk(part: Any, where: str) -> None:
        if not isinstance(part, dict):
            return
        unknown = part.keys() - KEYWORDS
        assert not unknown, f"{where}: {unknown}"
        for holder in ("properties", "definitions"):
            for name, child in part.get(holder, {}).items():
                walk(child, f"{where}.{name}")
        walk(part.get("items"), f"{where}[]")

    walk(SOURCE, "")


def test_every_value_is_used_by_a_template() -> None:
    templates = "\n".join(
        path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file()
    )
    last_names = {path.rpartition(".")[2] for path, _, _ in ROWS}
    unused = {name for name in last_names if not re.search(rf"\b{name}\b", templates)}
    # Images are looked up by the name that a template passes.
    assert not {name for name in unused if f'"{name}"' not in templates}


@pytest.mark.parametrize("path", [path for path, _, _ in ROWS] + list(SOURCE["properties"]))
def test_the_schema_refuses_unknown_keys_at_every_level(path: str) -> None:
    """Sections are closed: the schema refuses unknown keys at every level."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["additionalProperties"] is False
    part = schema
    for name in path.split(".")[:-1]:
        part = part["properties"][name]
        assert "properties" in part
        assert part["additionalProperties"] is (name == "global")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"operatr.replicas": 1}, ["operatr", "not allowed"]),
        ({"operator.replica": 1}, ["/operator", "replica", "not allowed"]),
        ({"operator.replicas": "two"}, ["/operator/replicas", "got string", "want integer"]),
        ({"operator.replicas": 0}, ["/operator/replicas", "minimum", "1"]),
        ({"operator.logLevel": "loud"}, ["/operator/logLevel", "debug", "warning"]),
        ({"gateway.port": 70000}, ["/gateway/port", "65,535"]),
        ({"threefs.storage.volume.size": "plenty"}, ["/threefs/storage/volume/size", "pattern"]),
        ({"images.storage.digest": "sha256:12"}, ["/images/storage/digest", "pattern"]),
        ({"images.storage.nmae": "x"}, ["/images/storage", "nmae"]),
        ({"csi.storageClass.trash": "1w"}, ["/csi/storageClass/trash", "pattern"]),
        ({"csi.storageClass.reclaimPolicy": "Recycle"}, ["reclaimPolicy", "Delete", "Retain"]),
        ({"injection.timeoutSeconds": 30}, ["/injection/timeoutSeconds", "5"]),
        ({"nodeAgent.tolerations": {"operator": "Exists"}}, ["/nodeAgent/tolerations", "array"]),
        ({"kubeletDir": "var/lib/kubelet"}, ["/kubeletDir", "pattern"]),
    ],
    ids=str,
)
def test_errors_of_invalid_values_name_the_value(values: dict[str, Any], words: list[str]) -> None:
    result = template(values)
    assert result.returncode != 0
    for word in words:
        assert word in result.stderr, result.stderr

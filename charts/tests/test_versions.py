"""Rendered charts decode strictly with each supported version of Kubernetes.

The module k8s.io/api contains an example of every kind with all fields set, for its own version and
the three before; Kubernetes uses them for round-trip tests. A server of a version drops fields
that its example does not have, and rejects values of another type. `test_server.py` tests the
validation of a real server of the latest version.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from charts.tests.conftest import ALL, KUBERNETES, SUPPORTED, Object, pods, template

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = Path(__file__).parents[2] / "programs" / "go" / "kubernetes"
DOWNLOAD_SECONDS = 300
ELSEWHERE = {"CustomResourceDefinition", "PodMonitor", "ServiceMonitor", "PrometheusRule"}
"""Kinds of other modules: the first has not changed since 1.16, the others have no examples."""
VALUES = {**ALL, "monitoring.podMonitors": False, "monitoring.serviceMonitors": True}
"""ServiceMonitors, because they have Services."""
NUMBER_OR_NAME = {"port", "targetPort", "maxSurge", "maxUnavailable", "minAvailable"}
"""Fields of type IntOrString whose example is a string."""


@pytest.fixture(scope="session")
def examples() -> Path:
    if shutil.which("go") is None:
        pytest.skip("Go is not installed; it downloads the module with the examples")
    result = subprocess.run(
        ["go", "mod", "download", "-json", "k8s.io/api"],
        cwd=MODULE,
        env={**os.environ, "GOFLAGS": "-mod=mod"},
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_SECONDS,
        check=True,
    )
    module = json.loads(result.stdout)
    assert module["Version"].split(".")[1:] == KUBERNETES.split(".")[1:]
    return Path(module["Dir"]) / "testdata"


@functools.cache
def example(folder: Path, api_version: str, kind: str) -> Object | None:
    group, _, version = api_version.rpartition("/")
    path = folder / f"{group or 'core'}.{version}.{kind}.json"
    return json.loads(path.read_text()) if path.exists() else None


def differences(value: Any, filled: Any, path: str) -> Iterator[str]:
    """Fields of a value that the example does not have, or has with another type."""
    field = re.sub(r"\[\d+\]$", "", path).rpartition(".")[2]
    if isinstance(filled, dict) and isinstance(value, dict):
        keys = list(filled)
        if keys == [f"{field}Key"]:  # a map with arbitrary keys
            filled = dict.fromkeys(value, filled[keys[0]])
        for name, part in value.items():
            if name not in filled:
                yield f"{path}.{name}: unknown field"
            else:
                yield from differences(part, filled[name], f"{path}.{name}")
    elif isinstance(filled, list) and isinstance(value, list):
        for index, part in enumerate(value):
            yield from differences(part, filled[0], f"{path}[{index}]")
    elif not _same_type(value, filled, field):
        yield f"{path}: {value!r} where an example is {filled!r}"


def _same_type(value: Any, filled: Any, field: str) -> bool:
    if isinstance(filled, str) and type(value) is int:
        return field in NUMBER_OR_NAME or filled == "0"  # or a quantity
    return type(value) is type(filled)


def rendered(version: str) -> list[Object]:
    result = template(VALUES, "--kube-version", version)
    assert result.returncode == 0, result.stderr
    return [item for item in YAML(typ="safe").load_all(result.stdout) if item]


def folder_of(examples: Path, version: str) -> Path:
    minor = version.rpartition(".")[0]
    return examples / ("HEAD" if version == KUBERNETES else f"v{minor}.0")


def unknown(objects: list[Object], folder: Path) -> Iterator[str]:
    for item in objects:
        if item["kind"] in ELSEWHERE:
            continue
        name = f"{item['kind']}/{item['metadata']['name']}"
        filled = example(folder, item["apiVersion"], item["kind"])
        if filled is None:
            yield f"{name}: {item['apiVersion']} has no such kind"
        else:
            yield from differences(item, filled, name)


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_supported_version_has_all_fields(version: str, examples: Path) -> None:
    objects = rendered(version)
    assert len([item for item in objects if item["kind"] not in ELSEWHERE]) > 50
    assert not list(unknown(objects, folder_of(examples, version)))


def test_fields_unknown_to_a_version_are_detected(examples: Path) -> None:
    oldest = folder_of(examples, SUPPORTED[0])
    latest = rendered(KUBERNETES)
    unknown_fields = list(unknown(latest, oldest))
    assert [match for match in unknown_fields if "MutatingAdmissionPolicy" in match]
    objects = copy.deepcopy(rendered(SUPPORTED[0]))
    name, pod = next(pods(objects))
    pod["spec"]["containers"][0] |= {"imagePullpolicy": "Always", "command": "true"}
    pod["spec"]["terminationGracePeriodSeconds"] = "30"
    place = f"{name}.spec.template.spec"
    words = [
        f"{place}.containers[0].command: 'true' where an example is ['commandValue']",
        f"{place}.containers[0].imagePullpolicy: unknown field",
        f"{place}.terminationGracePeriodSeconds: '30' where an example is ",
    ]
    for message, expected in zip(sorted(unknown(objects, oldest)), words, strict=True):
        assert message.startswith(expected)

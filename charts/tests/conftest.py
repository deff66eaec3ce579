"""Rendering of the chart, once for each set of values."""

import copy
import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from charts import helm

CHART = Path(__file__).resolve().parents[1] / "fire-flyer"
NAMESPACE = "fireflyer-system"
REGISTRY = "registry.example/fire-flyer"
IMAGES = {"images.registry": REGISTRY, "images.allowTags": True}
KUBERNETES = "1.36.3"
SUPPORTED = ("1.33.0", "1.34.0", "1.35.0", KUBERNETES)
"""For each it is rendered and decoded strictly; a real API server of the last takes the result."""
RENDER_SECONDS = 120
BUILD_SECONDS = 1500

Object = dict[str, Any]
Render = Callable[..., "Rendered"]


class Rendered(list[Object]):
    """The objects of one rendering."""

    def of(self, *kinds: str) -> list[Object]:
        return [item for item in self if item["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        [match] = [item for item in self.of(kind) if item["metadata"]["name"] == name]
        return match

    def policies_with_egress(self, rule: Object) -> set[str]:
        """Names of the NetworkPolicies that have this rule."""
        policies = self.of("NetworkPolicy")
        having = [item for item in policies if rule in (item["spec"].get("egress") or [])]
        return {item["metadata"]["name"] for item in having}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            # The first test may have to build Helm.
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


def run_helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [helm.find(), *arguments],
        capture_output=True,
        text=True,
        timeout=RENDER_SECONDS,
        check=False,
    )


def template(
    values: dict[str, Any], *arguments: str, chart: Path = CHART
) -> "subprocess.CompletedProcess[str]":
    sets = [
        word
        for key, value in {**IMAGES, **values}.items()
        for word in ("--set-json", f"{key}={json.dumps(value)}")
    ]
    return run_helm(
        "template", "fire-flyer", str(chart), "--namespace", NAMESPACE,
        "--kube-version", KUBERNETES, *sets, *arguments,
    )  # fmt: skip


def _rendered(values: str) -> Rendered:
    """A copy of the objects, which a test may change."""
    return copy.deepcopy(_rendered_once(values))


@functools.cache
def _rendered_once(values: str) -> Rendered:
    result = template(json.loads(values))
    assert result.returncode == 0, result.stderr
    return Rendered(item for item in YAML(typ="safe").load_all(result.stdout) if item)


@pytest.fixture
def render() -> Render:
    """Render with some values set, keys with dots: `render(**{"csi.enabled": False})`."""
    return lambda **values: _rendered(json.dumps(values, sort_keys=True))


@pytest.fixture
def everything() -> Rendered:
    """All that the chart can render."""
    return _rendered(json.dumps(ALL))


ALL = {
    "monitoring.podMonitors": True,
    "monitoring.rules": True,
    "monitoring.dashboards": True,
    "threefs.etcd.endpoints": ["https://etcd-0:2379", "https://etcd-1:2379"],
    "threefs.etcd.tlsSecret": "etcd-client",
    "threefs.etcd.clientCertificate": True,
    "threefs.etcd.user": "threefs",
    "threefs.etcd.passwordSecret": "etcd-user",
    "threefs.backup.enabled": True,
    # A class needs definitions that are not the chart's.
    "csi.snapshots.enabled": True,
    "csi.snapshots.snapshotClass.create": False,
}
"""Values that switch on what is off by default."""


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod template with the name of its owner."""
    for item in objects:
        if item["kind"] in {"Deployment", "DaemonSet", "StatefulSet", "Job"}:
            yield f"{item['kind']}/{item['metadata']['name']}", item["spec"]["template"]
        elif item["kind"] == "CronJob":
            job = item["spec"]["jobTemplate"]["spec"]
            yield f"CronJob/{item['metadata']['name']}", job["template"]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def variables(container: Object) -> dict[str, str]:
    return {item["name"]: item.get("value") for item in container["env"]}


def volumes(pod: Object) -> dict[str, Object]:
    return {volume["name"]: volume for volume in pod["spec"]["volumes"]}

"""The chart renders for every choice of components, and only what was chosen."""

import itertools
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from charts.tests.conftest import (
    ALL,
    CHART,
    KUBERNETES,
    REGISTRY,
    SUPPORTED,
    Render,
    Rendered,
    pods,
    run_helm,
    template,
)

DIGEST = "sha256:" + "a" * 64
COMPONENTS = ["operator", "nodeAgent", "threefs", "csi"]


def test_lint_finds_nothing() -> None:
    result = run_helm("lint", "--strict", str(CHART), "--kube-version", KUBERNETES)
    assert result.returncode == 0, result.stdout
    assert "[WARNING]" not in result.stdout


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_supported_version_renders_and_lints(version: str) -> None:
    result = template(ALL, "--kube-version", version)
    assert result.returncode == 0, result.stderr
    assert "kind: Deployment" in result.stdout
    lint = run_helm("lint", "--strict", str(CHART), "--kube-version", version)
    assert lint.returncode == 0, lint.stdout


def test_an_unsupported_version_is_refused_and_the_page_lists_the_supported_ones() -> None:
    oldest = min(int(version.split(".")[1]) for version in SUPPORTED)
    result = template({}, "--kube-version", f"1.{oldest - 1}.9")
    assert result.returncode != 0
    assert f">=1.{oldest}.0" in result.stderr
    page = (CHART.parents[1] / "docs" / "guides" / "install.md").read_text()
    newest = max(int(version.split(".")[1]) for version in SUPPORTED)
    assert f"Kubernetes 1.{oldest} to 1.{newest}" in page


@pytest.mark.parametrize(
    "switches", list(itertools.product([True, False], repeat=len(COMPONENTS))), ids=str
)
def test_any_choice_of_components_renders(switches: tuple[bool, ...], render: Render) -> None:
    values: dict[str, Any] = {
        f"{name}.enabled": on for name, on in zip(COMPONENTS, switches, strict=True)
    }
    if not values["threefs.enabled"] and values["csi.enabled"]:
        values["csi.existingClusterSecret"] = "elsewhere"
    owners = {name for name, _ in pods(render(**values, **ALL))}
    assert ("Deployment/flyer-operator" in owners) == values["operator.enabled"]
    assert ("DaemonSet/flyer-node" in owners) == values["nodeAgent.enabled"]
    assert ("StatefulSet/threefs-storage" in owners) == values["threefs.enabled"]
    assert ("DaemonSet/threefs-csi-node" in owners) == values["csi.enabled"]


@pytest.mark.parametrize(("trash", "parameters"), [("0", {}), ("7d", {"trash": "7d"})])
def test_the_class_keeps_removed_files(
    render: Render, trash: str, parameters: dict[str, str]
) -> None:
    """Without a retention the class, which is immutable, is that of earlier releases."""
    (storage_class,) = render(**{"csi.storageClass.trash": trash}).of("StorageClass")
    assert storage_class["parameters"] == {"path": "/volumes", **parameters}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"injection.enabled": False}, "MutatingWebhookConfiguration"),
        ({"networkPolicies.enabled": False}, "NetworkPolicy"),
        ({"priorityClasses.create": False}, "PriorityClass"),
        ({"flowControl.create": False}, "FlowSchema"),
        ({"csi.storageClass.create": False}, "StorageClass"),
        ({"crds.install": False}, "CustomResourceDefinition"),
        (
            {"admissionPolicies.enabled": False, "admissionPolicies.acceptWithout": True},
            "ValidatingAdmissionPolicy",
        ),
    ],
    ids=lambda value: str(value),
)
def test_disabled_components_are_not_rendered(
    values: dict[str, Any], kind: str, render: Render
) -> None:
    assert not render(**values).of(kind)


def test_definitions_outlive_the_release_by_default(render: Render) -> None:
    def policies(objects: Rendered) -> set[str | None]:
        definitions = objects.of("CustomResourceDefinition")
        assert definitions
        return {
            definition["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
            for definition in definitions
        }

    assert policies(render()) == {"keep"}
    assert policies(render(**{"crds.keep": False})) == {None}


def test_definitions_are_those_of_the_models(render: Render) -> None:
    rendered = {item["metadata"]["name"] for item in render().of("CustomResourceDefinition")}
    assert rendered == {path.stem for path in (CHART.parents[1] / "crds").glob("*.yaml")}


def test_rendering_without_a_cluster_generates_no_key(render: Render) -> None:
    """Argo CD and `helm template | kubectl apply` would replace the key at each rendering."""
    secret = render().named("Secret", "threefs-key")
    assert not {"data", "stringData"} & set(secret)
    own = render(**{"threefs.existingKeySecret": "mine"})
    assert [item for item in own.of("Secret") if item["metadata"]["name"] == "threefs-key"] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"threefs.replicas": 3, "threefs.storage.nodes": 2},
            ["threefs.replicas is 3", "only 2 storage services", "Raise threefs.storage.nodes"],
        ),
        (
            {"admissionPolicies.enabled": False},
            ["any writer of a status could forge it", "admissionPolicies.acceptWithout"],
        ),
        (
            {"threefs.enabled": False},
            ["3FS is not configured", "threefs.enabled", "csi.existingClusterSecret"],
        ),
        (
            {"images.registry": ""},
            ["images.registry is empty", "push them to a registry of yours"],
        ),
        (
            {"images.allowTags": False, "images.storage.digest": DIGEST},
            [
                "images without a digest: controller, collectives, nodeAgent, csiProvisioner, "
                "csiResizer, csiNodeDriverRegistrar, csiLivenessProbe.",
                "set images.NAME.digest",
                "images.allowTags",
            ],
        ),
        (
            {"images.allowTags": False, "csi.enabled": False, "nodeAgent.enabled": False},
            ["images without a digest: controller, collectives, storage."],
        ),
        (
            {"monitoring.podMonitors": True, "monitoring.serviceMonitors": True},
            ["monitoring.serviceMonitors are both true", "read twice", "Set one of them"],
        ),
    ],
    ids=str,
)
def test_incompatible_values_are_refused(values: dict[str, Any], words: list[str]) -> None:
    result = template(values)
    assert result.returncode != 0
    for word in words:
        assert word in result.stderr


def test_inline_volumes_are_disabled_by_default(render: Render) -> None:
    def modes_and_limit(**values: Any) -> tuple[list[str], str | None]:
        objects = render(**values)
        driver = objects.named("CSIDriver", "3fs.csi.fireflyer.dev")
        node = objects.named("DaemonSet", "threefs-csi-node")["spec"]["template"]["spec"]
        variables = {
            variable["name"]: variable.get("value") for variable in node["containers"][0]["env"]
        }
        return driver["spec"]["volumeLifecycleModes"], variables.get("THREEFS_INLINE_SIZE_MAX")

    assert modes_and_limit() == (["Persistent"], None)
    both = ["Persistent", "Ephemeral"]
    assert modes_and_limit(**{"csi.inline.enabled": True}) == (both, "10Gi")


def test_an_old_kubernetes_is_refused() -> None:
    result = run_helm("template", "x", str(CHART), "--kube-version", "1.29.0")
    assert result.returncode != 0
    assert "requires kubeVersion" in result.stderr


def test_notes_print_three_commands_that_fit_the_values(tmp_path: Path) -> None:
    notes = _notes(tmp_path, "csi.enabled=false")
    assert [f"{number}. " in notes for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert "-n elsewhere" in notes
    assert "CSI" not in notes


@pytest.mark.parametrize(
    ("value", "open_to_all"),
    [
        ("csi.enabled=false", True),
        ("networkPolicies.webhookFrom[0].ipBlock.cidr=10.0.0.10/32", False),
        ("injection.clientCA=authority", False),
        ("injection.enabled=false", False),
    ],
)
def test_notes_say_that_the_webhooks_port_is_open(
    value: str, open_to_all: bool, tmp_path: Path
) -> None:
    assert ("Every pod of the cluster can connect" in _notes(tmp_path, value)) == open_to_all


def _notes(folder: Path, value: str) -> str:
    """Helm prints notes only with a cluster; here they are rendered into an object."""
    chart = folder / "fire-flyer"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "NOTES.txt")
    (chart / "templates" / "notes.yaml").write_text(
        'kind: Notes\ntext: {{ tpl (.Files.Get "NOTES.txt") . | quote }}\n'
    )
    result = run_helm(
        "template", "fire-flyer", str(chart), "-n", "elsewhere", "--kube-version", KUBERNETES,
        "--set", f"{value},images.registry={REGISTRY},images.allowTags=true",
        "--show-only", "templates/notes.yaml",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    notes: str = YAML(typ="safe").load(result.stdout)["text"]
    return notes


def test_a_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    """`files/crds` is a link: Helm packages its target and prints a message."""
    result = run_helm("package", str(CHART), "--destination", str(tmp_path))
    assert result.returncode == 0, result.stderr
    [package] = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        packed = {member.name for member in archive if "/files/crds/" in member.name}
    crds = CHART.parents[1] / "crds"
    assert packed == {
        f"fire-flyer/files/crds/{path.relative_to(crds)}" for path in crds.rglob("*.yaml")
    }
    # The key and the certificate of the issuer are made by chance, so not of them.
    options = {"threefs.existingKeySecret": "key", "csi.issuer.existingSecret": "issuer"}
    result, folder = template(options, chart=package), template(options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == folder.stdout
    assert result.stdout.count("kind: CustomResourceDefinition") == len(list(crds.glob("*.yaml")))


def test_a_chart_without_definitions_or_policies_is_refused(tmp_path: Path) -> None:
    """Its operator would find none of its kinds, or nothing would keep tenants from its fields."""
    chart = tmp_path / "fire-flyer"
    shutil.copytree(CHART, chart, symlinks=True, ignore=shutil.ignore_patterns("crds"))
    off = {"admissionPolicies.enabled": False, "admissionPolicies.acceptWithout": True}
    for values, words in (
        (off, "files/crds of the chart has no definitions"),
        ({"crds.install": False}, "files/crds/policies of the chart has no policies"),
    ):
        result = template(values, chart=chart)
        assert result.returncode != 0
        assert words in result.stderr
    assert template({"crds.install": False, **off}, chart=chart).returncode == 0


def test_policies_name_the_service_accounts_of_the_release() -> None:
    result = template({}, "--namespace", "training", "--show-only", "templates/admission.yaml")
    assert result.returncode == 0, result.stderr
    assert "system:serviceaccount:training:flyer-operator" in result.stdout
    assert "fireflyer-system" not in result.stdout


def test_mutating_policies_are_rendered_only_for_versions_that_support_them() -> None:
    def kinds(version: str) -> set[str]:
        options = ("--set", f"images.registry={REGISTRY},images.allowTags=true")
        result = run_helm("template", "x", str(CHART), "--kube-version", version, *options)
        assert result.returncode == 0, result.stderr
        return {item["kind"] for item in YAML(typ="safe").load_all(result.stdout) if item}

    assert "MutatingAdmissionPolicy" in kinds("1.36.0")
    assert not {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"} & kinds("1.35.2")
    assert "ValidatingAdmissionPolicy" in kinds("1.35.2")


def test_one_value_enables_tls_for_every_service_and_client(render: Render) -> None:
    def settings(rendered: Rendered) -> set[tuple[str, str, str]]:
        """Kind and both TLS settings of each service container."""
        tls_settings = set()
        for workload in rendered.of("StatefulSet"):
            for container in workload["spec"]["template"]["spec"]["containers"]:
                env = {
                    variable["name"]: variable.get("value") for variable in container.get("env", [])
                }
                if "THREEFS_KEY_FILE" in env:
                    tls_settings.add(
                        (container["name"], env["THREEFS_TLS"], env["THREEFS_TLS_TRANSITION"])
                    )
        return tls_settings

    def cluster_file(rendered: Rendered) -> dict[str, Any]:
        text = rendered.named("ConfigMap", "threefs-cluster")["data"]["cluster.json"]
        parsed: dict[str, Any] = json.loads(text)
        return parsed

    for enabled, transition in itertools.product([False, True], repeat=2):
        rendered = render(**{"threefs.tls.enabled": enabled, "threefs.tls.transition": transition})
        tls_settings = settings(rendered)
        assert len(tls_settings) == 3, tls_settings
        assert {match[1:] for match in tls_settings} == {
            (str(enabled).lower(), str(transition).lower())
        }
        # Read by the CSI controller, the exporter and, with the key, nodes; tickets copy it.
        assert cluster_file(rendered)["tls"] is enabled
    assert cluster_file(render())["tls"] is False

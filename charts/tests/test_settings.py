"""Flags and variables set by the chart are read by the programs."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from flyer.kube.apiserver import LeaseSettings
from flyer.kube.injection.settings import WebhookSettings, parse_webhook_settings
from flyer.kube.settings import Settings, parse_settings
from flyer_node.settings import add_flags, read_settings

from charts.tests.conftest import Object, Render, Rendered, containers, pods, template

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"global.imagePullSecrets": [{"name": "one"}, {"name": "two"}]}


def container(render: Render, owner: str, name: str) -> Object:
    [pod] = [pod for owner_name, pod in pods(render(**LABELS)) if owner_name == owner]
    [matching] = [item for item in containers(pod) if item["name"] == name]
    return matching


def variables(container: Object) -> dict[str, str]:
    # Values from the downward API are strings, too.
    return {each["name"]: each.get("value", "x") for each in container["env"]}


def test_the_operator_reads_its_settings(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = variables(container(render, "Deployment/flyer-operator", "operator"))
    names = {f"FLYER_{field.name.upper()}" for field in fields(Settings)}
    assert environment.keys() <= names
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = parse_settings([])
    assert settings.gateway_port == 7443
    assert settings.injection is True
    # The defaults agree, also those of an Election that is created without settings.
    usual, candidate = parse_settings([], {}), LeaseSettings(namespace="")
    times = (settings.lease_seconds, settings.renew, settings.retry)
    assert times == (15, 10.0, 2.0)
    assert times == (usual.lease_seconds, usual.renew, usual.retry)
    assert times == (candidate.duration_seconds, candidate.renew_seconds, candidate.retry_seconds)
    assert f"flyer-webhook.{settings.namespace}.svc.cluster.local" in settings.names
    assert settings.image_pull_secrets == "one,two"
    assert settings.endpoint == "flyer-gateway.fireflyer-system.svc:7443"


def test_the_webhook_reads_its_settings(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = variables(container(render, "Deployment/flyer-webhook", "webhook"))
    names = {f"FLYER_{field.name.upper()}" for field in fields(WebhookSettings)}
    assert environment.keys() <= names
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = parse_webhook_settings([])
    assert (settings.port, settings.metrics_port) == (9443, 8080)
    assert settings.image_pull_secrets == "one,two"


def test_a_lease_that_cannot_be_renewed_in_time_is_refused() -> None:
    result = template({"operator.lease.renew": 20})
    assert result.returncode != 0
    assert "expected retry < renew < duration" in result.stderr


def test_the_node_agent_reads_its_settings(render: Render) -> None:
    import argparse

    agent = container(render, "DaemonSet/flyer-node", "node-agent")
    environment = {
        key: value for key, value in variables(agent).items() if key.startswith("FLYER_")
    }
    parser = argparse.ArgumentParser()
    add_flags(parser, environment)
    options = {action.dest for action in parser._actions}
    assert {name.removeprefix("FLYER_NODE_").lower() for name in environment} <= options
    settings = read_settings(parser.parse_args(agent["args"]), environment)
    assert settings.kernel_log is None
    assert str(settings.sysfs_root) == "/host/sys"
    assert settings.metrics_port == 8080


@pytest.mark.parametrize(
    ("owner", "name", "sources"),
    [
        ("StatefulSet/threefs-mgmtd", "mgmtd", "services"),
        ("StatefulSet/threefs-meta", "meta", "services"),
        ("StatefulSet/threefs-storage", "storage", "services"),
        ("Deployment/threefs-csi-controller", "driver", "csi"),
        ("DaemonSet/threefs-csi-node", "driver", "csi"),
        ("DaemonSet/threefs-csi-mount-manager", "mount-manager", "csi"),
    ],
)
def test_3fs_and_its_driver_read_their_settings(
    owner: str, name: str, sources: str, render: Render
) -> None:
    folder = ROOT / "csi-3fs" / "python" / "threefs" / sources
    options = ROOT / "csi-3fs" / "python" / "threefs" / "cli" / "shared_store.py"
    location = ROOT / "csi-3fs" / "python" / "threefs" / "location.py"
    text = "\n".join(path.read_text() for path in [*folder.rglob("*.py"), options, location])
    names = set(re.findall(r'"((?:THREEFS|CSI|NODE|POD)_[A-Z_]+)"', text))
    assert variables(container(render, owner, name)).keys() <= names


def test_labels_of_the_node_plugin_become_the_topology(
    render: Render, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threefs.csi import main as driver
    from threefs.csi.volumes.topology import parse_topology

    labels = {"example.com/storage": "yes", "kubernetes.io/os": "linux"}
    objects = render(**{
        "csi.topologyKeys": ["example.com/storage"],
        "csi.node.nodeSelector": labels,
        "csi.mountManager.nodeSelector": labels,
    })  # fmt: skip
    templates = dict(pods(objects))
    for owner in ("Deployment/threefs-csi-controller", "DaemonSet/threefs-csi-node"):
        [process] = [each for each in containers(templates[owner]) if each["name"] == "driver"]
        for name, value in variables(process).items():
            monkeypatch.setenv(name, value)
        text = driver._parser().parse_args(process["command"][1:]).topology
        segment = parse_topology(text).segment()
        assert segment is not None
        assert dict(segment.segments) == {"example.com/storage": "yes"}
        monkeypatch.undo()
    assert templates["DaemonSet/threefs-csi-node"]["spec"]["nodeSelector"] == labels


@pytest.mark.parametrize("keys", [[], ["example.com/storage"]])
def test_the_provisioner_reads_all_nodes_for_a_topology_only(
    render: Render, keys: list[str]
) -> None:
    labels = {"example.com/storage": "yes"}
    objects = render(**{"csi.topologyKeys": keys, "csi.node.nodeSelector": labels})
    [pod] = [pod for owner, pod in pods(objects) if owner == "Deployment/threefs-csi-controller"]
    [provisioner] = [each for each in containers(pod) if each["name"] == "provisioner"]
    assert (f"--feature-gates=Topology={'true' if keys else 'false'}") in provisioner["args"]
    assert ("--immediate-topology=false" in provisioner["args"]) == bool(keys)
    [role] = [
        item
        for item in objects.of("ClusterRole")
        if item["metadata"]["name"].endswith("csi-controller")
    ]
    [nodes] = [rule for rule in role["rules"] if rule["resources"] == ["nodes"]]
    assert nodes["verbs"] == (["get", "list", "watch"] if keys else ["get"])


def test_a_topology_that_nodes_may_lack_is_refused() -> None:
    result = template({"csi.topologyKeys": ["topology.kubernetes.io/zone"]})
    assert result.returncode != 0
    assert "csi.topologyKeys has topology.kubernetes.io/zone" in result.stderr
    assert "Add the label to csi.node.nodeSelector" in result.stderr


def located(render: Render, **values: str) -> tuple[Object, Rendered]:
    """The pod of the storage services, and all objects."""
    objects = render(**{f"threefs.storage.topology.{name}": each for name, each in values.items()})
    [pod] = [pod for owner, pod in pods(objects) if owner == "StatefulSet/threefs-storage"]
    return pod["spec"], objects


def test_storage_reports_its_node_as_host_and_has_no_token(render: Render) -> None:
    pod, objects = located(render)
    assert "initContainers" not in pod
    [storage] = pod["containers"]
    host = next(each for each in storage["env"] if each["name"] == "THREEFS_HOST")
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert "THREEFS_LOCATION_FILE" not in variables(storage)
    assert all("projected" not in each or each["name"] == "cluster" for each in pod["volumes"])
    names = [item["metadata"]["name"] for item in objects.of("ClusterRole")]
    roles = [name for name in names if name.endswith("threefs")]
    assert not roles


def test_mounts_know_their_node_and_its_labels(render: Render) -> None:
    def manager(objects: Rendered) -> tuple[Object, Object]:
        [pod] = [pod for owner, pod in pods(objects) if owner.endswith("csi-mount-manager")]
        [container] = [
            each for each in pod["spec"]["containers"] if each["name"] == "mount-manager"
        ]
        return pod["spec"], container

    pod, container = manager(render())
    host = next(each for each in container["env"] if each["name"] == "THREEFS_HOST")
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert "THREEFS_LOCATION_FILE" not in variables(container)
    assert "initContainers" not in pod
    objects = render(**{"threefs.storage.topology.zoneLabel": "topology.kubernetes.io/zone"})
    pod, container = manager(objects)
    [locate] = pod["initContainers"]
    file = variables(locate)["THREEFS_LOCATION_FILE"]
    assert variables(container)["THREEFS_LOCATION_FILE"] == file
    # Only the init container has the token; all volumes exist.
    volumes = {each["name"] for each in pod["volumes"]}
    for each in [locate, *pod["containers"]]:
        names = {mount["name"] for mount in each["volumeMounts"]}
        assert names <= volumes
        assert ("token" in names) == (each["name"] == "locate")
    [role] = [
        item for item in objects.of("ClusterRole") if item["metadata"]["name"].endswith("csi-node")
    ]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert not [
        item for item in render().of("ClusterRole") if item["metadata"]["name"].endswith("csi-node")
    ]


def test_zone_and_rack_are_read_by_an_init_container(render: Render) -> None:
    labels = {"zoneLabel": "topology.kubernetes.io/zone", "rackLabel": "example.com/rack"}
    pod, objects = located(render, **labels)
    [locate] = pod["initContainers"]
    assert locate["command"] == ["threefs-service", "locate"]
    environment = variables(locate)
    assert environment["THREEFS_ZONE_LABEL"] == labels["zoneLabel"]
    assert environment["THREEFS_RACK_LABEL"] == labels["rackLabel"]
    [storage] = pod["containers"]
    file = environment["THREEFS_LOCATION_FILE"]
    assert variables(storage)["THREEFS_LOCATION_FILE"] == file
    # Only the init container has the token.
    mounts = [{each["name"] for each in item["volumeMounts"]} for item in (locate, storage)]
    assert ["token" in names for names in mounts] == [True, False]
    assert all("location" in names for names in mounts)
    [role] = [
        item for item in objects.of("ClusterRole") if item["metadata"]["name"].endswith("threefs")
    ]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    options = (ROOT / "csi-3fs/python/threefs/services/cli.py").read_text()
    names = environment.keys() | variables(storage).keys()
    assert {name for name in names if name.startswith("THREEFS_")} <= set(
        re.findall(r"THREEFS_[A-Z_]+", options)
    )

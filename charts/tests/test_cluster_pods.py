"""The operator's pods of a ThreeFSCluster are those that the chart renders for the same values."""

import json
from typing import Any

import pytest
from flyer.api import ThreeFSCluster
from flyer.kube.threefs.objects import small_objects, stateful_set
from flyer.kube.threefs.settings import ClusterSettings

from charts.tests.conftest import NAMESPACE, Object, Render, Rendered, template

OPERATOR = {"threefs.managedBy": "Operator", "operator.threefsClusters": True}
ETCD = {
    "threefs.etcd.endpoints": ["https://etcd-0:2379", "https://etcd-1:2379"],
    "threefs.etcd.tlsSecret": "etcd-client",
    "threefs.etcd.clientCertificate": True,
    "threefs.etcd.user": "threefs",
    "threefs.etcd.passwordSecret": "etcd-user",
}
POSTGRES = {
    "threefs.postgres.hosts": ["pg-0.pg:5432", "pg-1.pg:5433"],
    "threefs.postgres.database": "rows",
    "threefs.postgres.user": "fire-flyer",
    "threefs.postgres.schema": "threefs_2",
    "threefs.postgres.passwordSecret": "pg-user",
    "threefs.postgres.tlsSecret": "pg-tls",
    "threefs.postgres.clientCertificate": True,
    "threefs.postgres.requireStandby": False,
}
PLACED = {
    "global.imagePullSecrets": [{"name": "registry"}],
    "threefs.tls.enabled": True,
    "threefs.existingKeySecret": "my-key",
    "threefs.storage.nodeSelector": {"disk": "nvme"},
    "threefs.storage.tolerations": [{"key": "storage", "operator": "Exists"}],
    "threefs.storage.nodes": 5,
    "threefs.storage.volume.storageClass": "local",
    "threefs.mgmtd.volume.storageClass": "fast",
    "threefs.meta.volume.storageClass": "fast",
    "threefs.meta.resources.limits.memory": "8Gi",
}
DISKS = {"threefs.storage.disks": 3}
VALUES: list[dict[str, Any]] = [{}, ETCD, POSTGRES, PLACED, DISKS, {**ETCD, **PLACED, **DISKS}]
IDS = ["default", "etcd", "postgres", "placed", "disks", "all"]


def cluster_of(objects: Rendered) -> ThreeFSCluster:
    [item] = objects.of("ThreeFSCluster")
    item["metadata"].update(uid="u", generation=1)
    return ThreeFSCluster.model_validate(item)


def comparable(stateful: Object) -> Object:
    """What decides what runs: lists with names as maps, without labels, which name the writer."""
    spec = {key: stateful["spec"].get(key) for key in (
        "serviceName", "replicas", "podManagementPolicy", "selector", "volumeClaimTemplates",
        "persistentVolumeClaimRetentionPolicy", "revisionHistoryLimit",
    )}  # fmt: skip
    pod = dict(stateful["spec"]["template"]["spec"])
    containers = {}
    for container in pod.pop("containers"):
        names = [variable["name"] for variable in container["env"]]
        assert len(names) == len(set(names))
        containers[container["name"]] = {
            **container,
            "env": {variable["name"]: variable for variable in container["env"]},
            "volumeMounts": {mount["name"]: mount for mount in container["volumeMounts"]},
        }
    pod["containers"] = containers
    pod["volumes"] = {volume["name"]: _decimal(volume) for volume in pod["volumes"]}
    return {**spec, "pod": pod}


def _decimal(volume: Object) -> Object:
    """Octal 0440 of the chart's YAML 1.1, which this test reads as YAML 1.2."""
    (source, content), *rest = [(key, value) for key, value in volume.items() if key != "name"]
    assert not rest
    if content.get("defaultMode") == 440:
        content = {**content, "defaultMode": 0o440}
    return {source: content}


@pytest.mark.parametrize("values", VALUES, ids=IDS)
def test_pods_and_claims_are_those_of_the_chart(render: Render, values: dict[str, Any]) -> None:
    by_chart, by_operator = render(**values), render(**values, **OPERATOR)
    assert not by_operator.of("StatefulSet")
    cluster = cluster_of(by_operator)
    for kind in ("mgmtd", "meta", "storage"):
        expected = by_chart.named("StatefulSet", f"threefs-{kind}")
        replicas = expected["spec"]["replicas"]
        actual = stateful_set(cluster, kind, replicas, ClusterSettings())
        assert comparable(actual) == comparable(expected), kind
        labels = actual["spec"]["template"]["metadata"]["labels"]
        assert actual["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_storage_service_has_a_claim_for_each_disk(render: Render) -> None:
    objects = render(**DISKS, **{"threefs.storage.volume.size": "7Gi"})
    spec = objects.named("StatefulSet", "threefs-storage")["spec"]
    claims = {
        claim["metadata"]["name"]: claim["spec"]["resources"]["requests"]["storage"]
        for claim in spec["volumeClaimTemplates"]
    }
    assert claims == {"data": "7Gi", "disk-1": "7Gi", "disk-2": "7Gi"}
    for kind in ("mgmtd", "meta"):
        other = objects.named("StatefulSet", f"threefs-{kind}")["spec"]
        assert [claim["metadata"]["name"] for claim in other["volumeClaimTemplates"]] == ["data"]


def test_several_disks_in_one_directory_of_the_node_are_refused() -> None:
    result = template({**DISKS, "threefs.storage.volume.hostPath": "/srv"})
    assert result.returncode != 0
    assert "several disks need claims" in result.stderr


@pytest.mark.parametrize("values", VALUES, ids=IDS)
def test_other_objects_are_those_of_the_chart(render: Render, values: dict[str, Any]) -> None:
    by_chart, by_operator = render(**values), render(**values, **OPERATOR)
    for wanted in small_objects(cluster_of(by_operator), ClusterSettings()):
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        expected = by_chart.named(kind, name)
        assert wanted.get("spec") == expected.get("spec"), (kind, name)
        assert wanted["metadata"]["namespace"] == NAMESPACE
        if kind == "ConfigMap":
            read = [json.loads(item["data"]["cluster.json"]) for item in (wanted, expected)]
            assert read[0] == read[1]
        missing = [item for item in by_operator.of(kind) if item["metadata"]["name"] == name]
        assert not missing, "both the release and the operator have it"


def test_the_operators_rights_for_clusters_are_off_by_default(render: Render) -> None:
    def resources(objects: Rendered) -> set[str]:
        return {
            resource
            for rule in objects.named("ClusterRole", "flyer-operator")["rules"]
            for resource in rule["resources"]
        }

    assert not {"statefulsets", "services", "jobs", "configmaps"} & resources(render())
    assert {"statefulsets", "services", "jobs", "configmaps"} < resources(
        render(**{"operator.threefsClusters": True})
    )


def test_users_may_read_clusters_and_only_a_role_of_its_own_writes_them(render: Render) -> None:
    for role in render().of("ClusterRole"):
        for rule in role["rules"]:
            if "threefsclusters" in rule["resources"] and "create" in rule["verbs"]:
                assert role["metadata"]["name"] == "flyer-threefs-admin"
                labels = role["metadata"]["labels"]
                assert not [key for key in labels if key.startswith("rbac.authorization")]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"operator.threefsClusters": False}, "operator.threefsClusters is false"),
        ({"threefs.storage.volume.hostPath": "/srv"}, "threefs.storage.volume.hostPath"),
        ({"threefs.meta.port": 9101}, "threefs.meta.port"),
        ({"threefs.storage.topology.zoneLabel": "zone"}, "threefs.storage.topology"),
        ({"threefs.nodeFailureMs": 5000}, "threefs.nodeFailureMs"),
    ],
)
def test_values_without_a_field_are_refused(values: dict[str, Any], words: str) -> None:
    result = template({**OPERATOR, **values})
    assert result.returncode != 0
    assert words in result.stderr

"""Storage services with several disks: claims, drains and health."""

from __future__ import annotations

from typing import Any

import pytest
from flyer.api import API_VERSION, ThreeFSCluster
from flyer.kube.threefs.health import NodeState, health_of
from flyer.kube.threefs.jobs import drain_job
from flyer.kube.threefs.objects import stateful_set
from flyer.kube.threefs.observed import ordinal_of_claim
from flyer.kube.threefs.settings import ClusterSettings

from .conftest import NAMESPACE, SPEC


def cluster(disks: int) -> ThreeFSCluster:
    value: dict[str, Any] = {
        "apiVersion": API_VERSION, "kind": "ThreeFSCluster",
        "metadata": {"name": "main", "namespace": "default", "uid": "u"},
        "spec": {**SPEC, "storage": {**SPEC["storage"], "disks": disks}},
    }  # fmt: skip
    return ThreeFSCluster.model_validate(value)


def page(*disks: str, **samples: dict[str, int]) -> str:
    """A page of metrics; of each metric, the value of the disks that are not 0."""
    lines = ["threefs_up 1", 'threefs_chains{state="whole"} 3']
    names = ("threefs_storage_replicas", "threefs_storage_sole_replicas", *samples)
    for name in dict.fromkeys(names):
        lines.append(f"# TYPE {name} gauge")
        values = samples.get(name, {})
        lines += [f'{name}{{storage="{disk}"}} {values.get(disk, 0)}' for disk in disks]
    return "\n".join([*lines, ""])


def test_the_health_of_a_service_is_the_sum_over_its_disks():
    health = health_of(
        page(
            "1", "1.1", "1.12", "2",
            threefs_storage_replicas={"1": 2, "1.1": 3, "1.12": 4, "2": 5},
            threefs_storage_sole_replicas={"1.12": 1},
            threefs_storage_draining={"1": 1, "1.1": 1, "2": 1},
            threefs_capacity_bytes={"1": 10, "1.1": 20, "2": 7},
            threefs_used_bytes={"1.1": 6, "2": 5},
        )
    )  # fmt: skip
    assert health is not None
    assert health.nodes == {
        # One of its disks is not drained.
        1: NodeState(9, sole_replicas=1, draining=False, capacity_bytes=30, used_bytes=6),
        2: NodeState(5, draining=True, capacity_bytes=7, used_bytes=5),
    }


@pytest.mark.parametrize("label", ["", "x", "1.x", "1.2.3", "1.", ".1", "1.1234", "1234567"])
def test_a_label_that_names_no_disk_counts_for_no_service(label):
    health = health_of(page("1", label, threefs_storage_replicas={"1": 2, label: 5}))
    assert health is not None
    assert health.nodes == {1: NodeState(2)}


@pytest.mark.parametrize(
    ("claim", "ordinal"),
    [
        ("data-threefs-storage-3", 3),
        ("disk-1-threefs-storage-3", 3),
        ("disk-12-threefs-storage-30", 30),
        ("disk-threefs-storage-3", None),
        ("disk-1-threefs-storage-", None),
        ("other-threefs-storage-3", None),
        ("data-threefs-mgmtd-0", None),
    ],
)
def test_the_claims_of_all_disks_belong_to_their_service(claim, ordinal):
    assert ordinal_of_claim(claim) == ordinal


def test_each_disk_has_a_claim_and_is_mounted_where_the_service_looks_for_it():
    spec = stateful_set(cluster(3), "storage", 4, ClusterSettings())["spec"]
    claims = [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]]
    assert claims == ["data", "disk-1", "disk-2"]
    [container] = spec["template"]["spec"]["containers"]
    paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert [paths[claim] for claim in claims] == ["/data", "/disks/1", "/disks/2"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (values["THREEFS_DATA"], values["THREEFS_DISKS"]) == ("/data", "/disks/1:/disks/2")


def test_a_service_with_one_disk_has_the_claim_of_earlier_releases():
    spec = stateful_set(cluster(1), "storage", 4, ClusterSettings())["spec"]
    assert [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]] == ["data"]
    [container] = spec["template"]["spec"]["containers"]
    assert "THREEFS_DISKS" not in {variable["name"] for variable in container["env"]}


@pytest.mark.parametrize(
    ("disks", "cancel", "words"),
    [
        (1, False, ["threefs", "drain", "3", "4", "--apply"]),
        (2, False, ["threefs", "drain", "service-3", "service-4", "--apply"]),
        (2, True, ["threefs", "drain", "--cancel", "service-3", "service-4", "--apply"]),
    ],
)
def test_a_drain_empties_every_disk_of_a_service(disks, cancel, words):
    job = drain_job(cluster(disks), {4, 3}, cancel=cancel)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][: len(words)] == words


@pytest.mark.usefixtures("operator")
async def test_the_lost_claim_of_a_disk_is_named(kubernetes, until):
    kubernetes.create()
    labels = {
        "app.kubernetes.io/instance": "main",
        "app.kubernetes.io/component": "threefs-storage",
    }
    name = "disk-2-threefs-storage-1"
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": labels}, "spec": {},
    }  # fmt: skip
    kubernetes.store.create("persistentvolumeclaims", claim, NAMESPACE)
    kubernetes.store.patch(
        "persistentvolumeclaims", name, {"status": {"phase": "Lost"}}, NAMESPACE, "status"
    )
    await until(
        lambda: f"claim {name} is lost" in kubernetes.condition("Degraded").get("message", "")
    )

    def states() -> dict[str, str]:
        return {node["name"]: node["state"] for node in kubernetes.status()["storageNodes"]}

    await until(lambda: states().get("threefs-storage-1") == "Failed")

"""The controller of ThreeFSClusters on the in-memory API server."""

from __future__ import annotations

import asyncio

import pytest
from flyer.kube.threefs import rollout
from flyer.kube.threefs.health import Health, NodeState

from fakekube import Fault

from .conftest import NAMESPACE

pytestmark = pytest.mark.usefixtures("operator")


@pytest.fixture(autouse=True)
def no_settling(monkeypatch):
    monkeypatch.setattr(rollout, "SETTLE_SECONDS", 0.0)


def phase(kubernetes):
    return kubernetes.status().get("phase")


async def created(kubernetes, until, **spec):
    kubernetes.create(**spec)
    await until(lambda: phase(kubernetes) == "Ready")


async def test_a_cluster_becomes_ready(kubernetes, until):
    kubernetes.health = Health(
        4, nodes={n: NodeState(2, capacity_bytes=3 << 40, used_bytes=1 << 39) for n in (1, 2, 3, 4)}
    )
    await created(kubernetes, until)
    status = kubernetes.status()
    assert (status["ready"], status["version"]) == ("6/6", "1")
    assert (status["capacity"], status["used"]) == ("12.0TiB", "2.0TiB")
    assert status["storage"] == {"replicas": 4, "ready": 4, "updated": 4}
    assert status["chains"] == {"whole": 4, "degraded": 0, "unavailable": 0}
    assert {node["state"] for node in status["storageNodes"]} == {"Serving"}
    assert kubernetes.condition("Available")["status"] == "True"
    assert kubernetes.condition("Progressing")["status"] == "False"
    assert kubernetes.asked[-1] == ["192.0.2.1"]
    uid = kubernetes.store.get("threefsclusters", "main", NAMESPACE)["metadata"]["uid"]
    for plural, name in (
        ("statefulsets", "threefs-storage"), ("services", "threefs-meta"),
        ("configmaps", "threefs-cluster"), ("serviceaccounts", "threefs"),
        ("poddisruptionbudgets", "threefs-storage"),
    ):  # fmt: skip
        [owner] = kubernetes.store.get(plural, name, NAMESPACE)["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid, True)


async def test_a_cluster_at_rest_is_not_written(kubernetes, until):
    await created(kubernetes, until)
    version, looks = kubernetes.store.version, len(kubernetes.asked)
    await until(lambda: len(kubernetes.asked) > looks + 5)
    assert kubernetes.store.version == version


async def test_an_upgrade_replaces_every_pod(kubernetes, until):
    await created(kubernetes, until)
    before = {pod["metadata"]["uid"] for pod in kubernetes.pods()}
    kubernetes.edit(image="r/threefs:2")
    await until(lambda: kubernetes.status().get("version") == "2")
    assert kubernetes.replaced == [
        *(f"threefs-storage-{n}" for n in (3, 2, 1, 0)), "threefs-mgmtd-0", "threefs-meta-0",
    ]  # fmt: skip
    assert before.isdisjoint(pod["metadata"]["uid"] for pod in kubernetes.pods())
    await until(lambda: phase(kubernetes) == "Ready")


async def test_an_upgrade_to_a_broken_image_stops_and_names_the_pod(kubernetes, until):
    await created(kubernetes, until)
    kubernetes.broken = {"r/threefs:2"}
    kubernetes.edit(image="r/threefs:2")
    await until(lambda: phase(kubernetes) == "Blocked")
    blocked = kubernetes.condition("UpgradeBlocked")
    assert blocked["reason"] == "PodNotReady"
    assert blocked["message"].startswith("threefs-storage-3 does not become ready: ImagePullBack")
    looks = len(kubernetes.asked)
    await until(lambda: len(kubernetes.asked) > looks + 5)
    assert kubernetes.replaced == ["threefs-storage-3"]
    assert kubernetes.status()["version"] == "1"
    kubernetes.edit(image="r/threefs:1")
    await until(lambda: phase(kubernetes) == "Ready")
    assert kubernetes.replaced == ["threefs-storage-3"] * 2


async def test_an_upgrade_waits_for_degraded_chains(kubernetes, until):
    await created(kubernetes, until)
    kubernetes.health = Health(3, degraded=1, nodes={1: NodeState(2)})
    kubernetes.edit(image="r/threefs:2")
    await until(lambda: "1 degraded" in kubernetes.condition("Progressing").get("message", ""))
    assert not kubernetes.replaced
    assert kubernetes.condition("Degraded")["reason"] == "ReplicasMissing"


async def test_services_are_removed_after_their_drain(kubernetes, until):
    await created(kubernetes, until)
    kubernetes.edit(storage={"replicas": 3})
    await until(lambda: kubernetes.store.find("jobs", "threefs-drain", NAMESPACE))
    job = kubernetes.store.get("jobs", "threefs-drain", NAMESPACE)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:4] == ["threefs", "drain", "4", "--apply"]
    draining = {**kubernetes.health.nodes, 4: NodeState(2, draining=True)}
    kubernetes.health = Health(4, nodes=draining)
    await until(lambda: "2 replicas are left" in kubernetes.condition("Progressing")["message"])
    assert kubernetes.status()["storageNodes"][3]["state"] == "Draining"
    kubernetes.end_job("threefs-drain", "Complete")
    # It has succeeded, but replicas are reported: it is repeated, and no pod is removed.
    await until(
        lambda: (
            (again := kubernetes.store.find("jobs", "threefs-drain", NAMESPACE))
            and again["metadata"]["uid"] != job["metadata"]["uid"]
        )
    )
    assert kubernetes.stateful_set("storage")["spec"]["replicas"] == 4
    kubernetes.health = Health(4, nodes={**draining, 4: NodeState(0, draining=True)})
    kubernetes.end_job("threefs-drain", "Complete")
    await until(lambda: kubernetes.stateful_set("storage")["spec"]["replicas"] == 3)
    await until(lambda: not kubernetes.store.find("jobs", "threefs-drain", NAMESPACE))
    await until(lambda: phase(kubernetes) == "Ready")
    await until(lambda: len(kubernetes.pods("storage")) == 3)
    assert not kubernetes.replaced


async def test_pods_with_the_labels_of_a_cluster_are_not_its_pods(kubernetes, until):
    """A page of metrics of another pod, for example, could end the wait of a restart."""
    await created(kubernetes, until)
    [mgmtd] = kubernetes.pods("mgmtd")
    for kind in ("mgmtd", "storage"):
        name = f"x-{kind}-9"
        labels = {**mgmtd["metadata"]["labels"], "app.kubernetes.io/component": f"threefs-{kind}"}
        pod = {"metadata": {"name": name, "labels": labels}, "spec": mgmtd["spec"]}
        kubernetes.store.create("pods", {"apiVersion": "v1", "kind": "Pod", **pod}, NAMESPACE)
        status = {**mgmtd["status"], "podIP": "192.0.2.66"}
        kubernetes.store.patch("pods", name, {"status": status}, NAMESPACE, "status")
    looks = len(kubernetes.asked)
    await until(lambda: len(kubernetes.asked) > looks + 2)
    assert kubernetes.asked[-1] == ["192.0.2.1"]
    kubernetes.edit(image="r/threefs:2")
    await until(lambda: kubernetes.status().get("version") == "2")
    assert kubernetes.status()["storage"]["replicas"] == 4
    assert {pod["metadata"]["name"] for pod in kubernetes.store.all("pods")} >= {
        "x-mgmtd-9", "x-storage-9",
    }  # fmt: skip


async def test_a_refused_eviction_is_reported_and_delays_no_drain(kubernetes, until, api_server):
    await created(kubernetes, until)
    for resource, code in (("pods/eviction", 429), ("pods/eviction", 403)):
        api_server.faults.add(
            Fault("refuse", resource=resource, code=code, times=1_000_000, retry_after_seconds=100)
        )
        kubernetes.edit(image=f"r/threefs:{code}")
        await until(lambda: "waiting: " in kubernetes.condition("Progressing")["message"])
        assert kubernetes.condition("Progressing")["reason"] == "Upgrading"
        assert kubernetes.condition("Accepted")["status"] == "True"
        assert not kubernetes.replaced
        if code == 403:
            kubernetes.edit(storage={"replicas": 3})
            await until(lambda: kubernetes.store.find("jobs", "threefs-drain", NAMESPACE))
        api_server.faults.clear()
        await until(lambda code=code: kubernetes.status().get("version") == str(code))
        kubernetes.replaced.clear()


async def test_mgmtd_waits_for_no_service_that_was_removed_before_the_first_chain(
    kubernetes, until
):
    kubernetes.health = Health(nodes={1: NodeState(), 2: NodeState()})
    kubernetes.create()
    await until(lambda: kubernetes.condition("Available").get("reason") == "NoChains")

    def expected():
        [service, _] = kubernetes.stateful_set("mgmtd")["spec"]["template"]["spec"]["containers"]
        [nodes] = [each for each in service["env"] if each["name"] == "THREEFS_STORAGE_NODES"]
        return nodes["value"]

    assert expected() == "4"
    kubernetes.edit(storage={"replicas": 2})
    await until(lambda: expected() == "2")
    await until(lambda: kubernetes.replaced == ["threefs-mgmtd-0"])
    kubernetes.health = Health(2, nodes={1: NodeState(2), 2: NodeState(2)})
    kubernetes.edit(storage={"replicas": 3})
    await until(lambda: len(kubernetes.pods("storage")) == 3)
    assert expected() == "2", "chains exist"


async def test_a_pod_that_was_replaced_meanwhile_is_not_evicted(kubernetes, until):
    await created(kubernetes, until)

    revision = kubernetes.stateful_set("storage")["status"]["updateRevision"]

    async def replace_the_next_pod():
        if kubernetes.stateful_set("storage")["status"]["updateRevision"] == revision:
            kubernetes.before_health = replace_the_next_pod
            return
        kubernetes.store.delete("pods", "threefs-storage-3", NAMESPACE, {"gracePeriodSeconds": 0})
        await until(lambda: kubernetes.replaced)

    kubernetes.edit(image="r/threefs:2")
    kubernetes.before_health = replace_the_next_pod
    await until(lambda: kubernetes.status().get("version") == "2")
    storage = [name for name in kubernetes.replaced if "storage" in name]
    assert storage == [f"threefs-storage-{n}" for n in (3, 2, 1, 0)]


async def test_the_job_of_another_owner_proves_no_drain(kubernetes, until):
    await created(kubernetes, until)
    empty = {**kubernetes.health.nodes, 4: NodeState(0, draining=True)}
    kubernetes.health = Health(4, nodes=empty)
    labels = kubernetes.pods("storage")[0]["metadata"]["labels"]
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "spec": {},
        "metadata": {
            "name": "threefs-drain", "labels": labels,
            "annotations": {"fireflyer.dev/storage-nodes": "4"},
        },
    }  # fmt: skip
    kubernetes.store.create("jobs", job, NAMESPACE)
    kubernetes.end_job("threefs-drain", "Complete")
    kubernetes.edit(storage={"replicas": 3})
    await until(lambda: "draining service-4" in kubernetes.condition("Progressing")["message"])
    looks = len(kubernetes.asked)
    await until(lambda: len(kubernetes.asked) > looks + 3)
    assert kubernetes.stateful_set("storage")["spec"]["replicas"] == 4


async def test_a_second_cluster_of_a_namespace_is_refused(kubernetes, until):
    await created(kubernetes, until)
    kubernetes.create("second")
    await until(lambda: kubernetes.condition("Accepted", "second").get("reason") == "Conflict")
    assert "a ThreeFSCluster already, main" in kubernetes.condition("Accepted", "second")["message"]
    assert kubernetes.status("second")["phase"] == "Blocked"


async def test_a_cluster_with_the_rows_of_another_one_is_refused(kubernetes, until):
    await created(kubernetes, until)
    kubernetes.store.create("namespaces", {"metadata": {"name": "other"}})
    etcd = {"endpoints": ["http://etcd:2379", "http://etcd-1:2379"], "prefix": "/3fs/b"}
    kubernetes.create("far", "other", metadata={"etcd": etcd})
    await until(
        lambda: kubernetes.condition("Accepted", "far", "other").get("reason") == "Conflict"
    )
    assert "default/main" in kubernetes.condition("Accepted", "far", "other")["message"]
    sets = kubernetes.store.all("statefulsets")
    assert {stateful["metadata"]["namespace"] for stateful in sets} == {NAMESPACE}


async def test_clusters_share_a_database_with_different_schemas_only(kubernetes, until):
    kubernetes.store.create("namespaces", {"metadata": {"name": "other"}})
    postgres = {"hosts": ["pg-0:5432", "pg-1:5432"], "passwordSecret": "pg-user"}
    kubernetes.create(metadata={"postgres": postgres})
    await until(lambda: phase(kubernetes) == "Ready")
    same = {**postgres, "hosts": ["pg-1:5432"]}
    kubernetes.create("far", "other", metadata={"postgres": same})
    await until(
        lambda: kubernetes.condition("Accepted", "far", "other").get("reason") == "Conflict"
    )
    message = kubernetes.condition("Accepted", "far", "other")["message"]
    assert "default/main" in message
    assert "such as threefs_2" in message
    kubernetes.store.create("namespaces", {"metadata": {"name": "third"}})
    own = {**postgres, "schema": "threefs_2"}
    kubernetes.create("apart", "third", metadata={"postgres": own})
    await until(lambda: kubernetes.status("apart", "third").get("phase") == "Ready")


async def test_objects_of_another_owner_are_not_touched(kubernetes, until):
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "x", "controller": True}
    foreign = {
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "threefs-meta", "ownerReferences": [owner]},
        "spec": {"ports": [{"port": 1}]},
    }  # fmt: skip
    kubernetes.store.create("services", foreign, NAMESPACE)
    kubernetes.create()
    await until(lambda: kubernetes.condition("Accepted").get("reason") == "Conflict")
    assert (
        "Service threefs-meta belongs to ConfigMap x" in kubernetes.condition("Accepted")["message"]
    )
    assert kubernetes.store.get("services", "threefs-meta", NAMESPACE)["spec"]["ports"] == [
        {"port": 1}
    ]
    assert not kubernetes.store.all("statefulsets")


async def test_stateful_sets_of_a_release_are_adopted_with_their_claims(kubernetes, until):
    await created(kubernetes, until)
    for stateful in kubernetes.store.all("statefulsets"):  # as the chart has made it
        del stateful["metadata"]["ownerReferences"], stateful["metadata"]["annotations"]
        stateful["spec"]["updateStrategy"] = {"type": "RollingUpdate"}
        stateful["spec"]["template"]["metadata"]["labels"]["helm.sh/chart"] = "fire-flyer-0.1.0"
        with kubernetes.store.unchecked():
            kubernetes.store.replace(
                "statefulsets", stateful["metadata"]["name"], stateful, NAMESPACE
            )
    await until(
        lambda: kubernetes.stateful_set("storage")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    )
    claim = kubernetes.stateful_set("storage")["spec"]["volumeClaimTemplates"]
    assert claim[0]["spec"]["resources"] == {"requests": {"storage": "100Gi"}}
    [owner] = kubernetes.stateful_set("storage")["metadata"]["ownerReferences"]
    assert owner["kind"] == "ThreeFSCluster"
    await until(lambda: phase(kubernetes) == "Ready")


async def test_a_stateful_set_with_another_selector_is_refused(kubernetes, until):
    await created(kubernetes, until)
    selector = {"matchLabels": {"app.kubernetes.io/instance": "release"}}
    with kubernetes.store.unchecked():
        kubernetes.store.patch(
            "statefulsets", "threefs-meta", {"spec": {"selector": selector}}, NAMESPACE
        )
    await until(lambda: kubernetes.condition("Accepted").get("reason") == "Conflict")
    assert "StatefulSet threefs-meta selects" in kubernetes.condition("Accepted")["message"]


async def test_a_cluster_whose_mgmtd_hangs_does_not_delay_another(kubernetes, until):
    kubernetes.store.create("namespaces", {"metadata": {"name": "other"}})
    await created(kubernetes, until)
    hanging = asyncio.Event()
    kubernetes.hang = hanging  # the next read of a health does not end
    await until(hanging.is_set)
    etcd = {"endpoints": ["http://etcd:2379"], "prefix": "/b"}
    kubernetes.create("far", "other", metadata={"etcd": etcd})
    await until(lambda: kubernetes.status("far", "other").get("phase") == "Ready")


async def test_a_failed_list_and_a_conflict_are_retried(kubernetes, until, api_server):
    api_server.faults.add(
        Fault("refuse", verb="list", resource="threefsclusters", code=403, reason="Forbidden")
    )
    api_server.faults.add(
        Fault(
            "refuse", verb="update", resource="threefsclusters/status", code=409, reason="Conflict"
        )
    )
    await created(kubernetes, until)

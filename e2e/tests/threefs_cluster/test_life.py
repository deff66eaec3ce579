"""A ThreeFSCluster from its creation to its end, while a pod writes and reads a volume in it."""

from __future__ import annotations

import base64
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib import volumes
from e2e.lib.chart import NAMESPACE
from e2e.lib.volumes import ENDS, claim, pod_with
from testcluster.handle import wait_for
from testcluster.measurements import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.lib import chart
    from testcluster.handle import Cluster

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(2700)]

NAME = "main"
IMAGE = "docker.io/fireflyer/storage:test"
CLASS, FOLDER = "threefs-cluster-disks", "/var/lib/fire-flyer/threefs-cluster"
ROWS_NODE, WRITER, READER = "node-s1", "node-a1", "node-b1"
STORAGE_NODES = ("node-a1", "node-a2", "node-b1", "node-b2")
STEP_SECONDS = 1200.0  # a loaded machine; the longest step takes four minutes on an idle one
ACCESS = "threefs-cluster-access"

# Compares each line that it has stored with what it reads back, and never stops on its own.
WRITES = """nohup sh -c 'n=0; while [ ! -e /volume/stop ]; do
echo $n >> /volume/lines; sync /volume/lines
[ "$(tail -n 1 /volume/lines)" = $n ] || echo $n >> /volume/wrong
n=$((n+1)); sleep 0.1
done; touch /volume/stopped' > /dev/null 2>&1 &"""


def disk(name: str, node: str, size: str) -> dict[str, Any]:
    """A local disk of a node."""
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": CLASS,
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": f"{FOLDER}/{name}"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
        },
    }


DISKS = {
    **{f"threefs-cluster-rows-{number}": (ROWS_NODE, "1Gi") for number in range(2)},
    **{f"threefs-cluster-{node}": (node, "2Gi") for node in STORAGE_NODES},
}


def manifest() -> dict[str, Any]:
    """Three storage services with two replicas of every chunk; rows on volumes."""
    return {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "ThreeFSCluster",
        "metadata": {"name": NAME},
        "spec": {
            "image": IMAGE,
            "metadata": {
                "embedded": {"storageClass": CLASS, "mgmtdSize": "1Gi", "metaSize": "1Gi"}
            },
            "mgmtd": {"nodeSelector": {"kubernetes.io/hostname": ROWS_NODE}},
            "meta": {"nodeSelector": {"kubernetes.io/hostname": ROWS_NODE}},
            "storage": {
                "replicas": 3,
                "replication": 2,
                "chainsPerNode": 2,
                "volume": {"storageClass": CLASS, "size": "2Gi"},
                "tolerations": [{"operator": "Exists"}],
            },
        },
    }


@pytest.fixture
def disks(cluster: Cluster) -> Iterator[None]:
    """Empty disks for the services; removed with their contents."""
    for name, (node, _) in DISKS.items():
        cluster.run_on(node, "mkdir", "-p", f"{FOLDER}/{name}")
    cluster.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": CLASS},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        *(disk(name, *where) for name, where in DISKS.items()),
    )
    yield
    cluster.kubectl("delete", "pv", *DISKS, "--ignore-not-found", "--wait=false")
    cluster.kubectl("delete", "storageclass", CLASS, "--ignore-not-found")
    for node in {node for node, _ in DISKS.values()}:
        cluster.run_on(node, "rm", "-rf", FOLDER)


@pytest.fixture
def dedicated_nodes(release: chart.Release, namespace: str) -> Iterator[None]:
    """Lets the services run on the nodes of jobs, as an administrator does: no others are free."""
    cluster = release.cluster
    cluster.kubectl(
        "create", "clusterrolebinding", namespace, "--clusterrole=flyer-dedicated-nodes",
        f"--serviceaccount={namespace}:threefs",
    )  # fmt: skip
    yield
    cluster.kubectl("delete", "clusterrolebinding", namespace)


@pytest.fixture
def operated(release: chart.Release) -> Iterator[chart.Release]:
    """The release with ThreeFSClusters; its driver uses the 3FS of the chart again afterwards."""
    before = dict(release.values)
    release.values["operator.threefsClusters"] = True
    release.install()
    yield release
    release.values = before
    release.install()
    cluster, space = release.cluster, f"--namespace={NAMESPACE}"
    cluster.kubectl("delete", "secret", ACCESS, space, "--ignore-not-found")


@pytest.fixture
def emptied(
    operated: chart.Release, disks: None, dedicated_nodes: None, namespace: str
) -> Iterator[None]:
    """Deletes also after a failure what the driver can delete only while it uses this 3FS."""
    yield
    delete_all(operated.cluster, namespace)


def status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    item = cluster.get("threefscluster", NAME, namespace)
    observed = item.get("status") or {}
    if observed.get("observedGeneration") != item["metadata"]["generation"]:
        return {}
    return dict(observed)


def wait_settled(cluster: Cluster, namespace: str, storage: int) -> dict[str, Any]:
    """Waits until the latest specification runs everywhere, and every replica serves."""

    def settled() -> dict[str, Any] | None:
        now = status(cluster, namespace)
        counts = {kind: now.get(kind) or {} for kind in ("mgmtd", "meta", "storage")}
        wanted = {"mgmtd": 1, "meta": 1, "storage": storage}
        complete = all(set(counts[kind].values()) == {number} for kind, number in wanted.items())
        return now if now.get("phase") == "Ready" and complete else None

    what = f"{storage} storage services: {NAME} to be Ready"
    return wait_for(what, settled, STEP_SECONDS) or {}


def wait_changed(cluster: Cluster, namespace: str) -> None:
    """As the upgrade guide waits: once it returns, every pod is of the change and serves."""
    cluster.kubectl(
        "wait", "threefscluster", NAME, f"--namespace={namespace}",
        "--for=condition=Progressing=false", f"--timeout={STEP_SECONDS:.0f}s",
        deadline_s=STEP_SECONDS + 60,
    )  # fmt: skip


def change(cluster: Cluster, namespace: str, spec: dict[str, Any]) -> None:
    cluster.kubectl(
        "patch", "threefscluster", NAME, f"--namespace={namespace}", "--type=merge",
        f"--patch={json.dumps({'spec': spec})}",
    )  # fmt: skip


def let_the_driver_use(release: chart.Release, namespace: str, key: str) -> None:
    """As with an external 3FS: a Secret with the addresses and the key."""
    cluster = release.cluster
    # The driver of the release could not delete volumes of the 3FS of the chart any more.
    wait_for("volumes of other tests to be gone", lambda: not claims_left(cluster), STEP_SECONDS)
    addresses = cluster.get("configmap", "threefs-cluster", namespace)["data"]["cluster.json"]
    data = {"cluster.json": addresses, "key": key}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": ACCESS},
            "data": {name: base64.b64encode(text.encode()).decode() for name, text in data.items()},
        },
        namespace=NAMESPACE,
    )
    release.values["csi.existingClusterSecret"] = ACCESS
    release.install()


def claims_left(cluster: Cluster) -> list[str]:
    """PersistentVolumes of the chart's class."""
    return [
        item["metadata"]["name"]
        for item in cluster.get("pv")
        if item["spec"].get("storageClassName") == "threefs"
    ]


def lines(cluster: Cluster, namespace: str, pod: str) -> int:
    return int(volumes.sh(cluster, namespace, pod, "wc -l < /volume/lines"))


def wait_progress(cluster: Cluster, namespace: str, seen: int) -> int:
    """Waits until the writer has stored more lines; their number."""
    return wait_for(
        f"more than {seen} lines",
        lambda: count if (count := lines(cluster, namespace, "writer")) > seen else None,
        STEP_SECONDS,
    )


@pytest.mark.usefixtures("emptied")
def test_a_threefscluster_grows_is_upgraded_and_shrinks_under_a_writer(
    operated: chart.Release, namespace: str
) -> None:
    cluster, key = operated.cluster, "ab" * 32
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "threefs-key"},
        "stringData": {"key": key},
    }
    started_at = time.monotonic()
    cluster.apply(secret, manifest(), namespace=namespace)
    created = wait_settled(cluster, namespace, 3)
    record("threefs_cluster", "ready_seconds", time.monotonic() - started_at)
    assert created["chains"]["unavailable"] == created["chains"]["degraded"] == 0
    let_the_driver_use(operated, namespace, key)

    cluster.apply(
        claim("data", "64Mi"),
        pod_with("writer", WRITER, "data"),
        pod_with("reader", READER, "data"),
        namespace=namespace,
    )
    cluster.wait_ready("writer", "reader", namespace=namespace, deadline_s=STEP_SECONDS)
    volumes.sh(cluster, namespace, "writer", WRITES)
    seen = wait_progress(cluster, namespace, 0)

    # A fourth storage service gets a share of the replicas.
    change(cluster, namespace, {"storage": {"replicas": 4}})
    wait_settled(cluster, namespace, 4)
    wait_for(
        "replicas on the added service",
        lambda: replicas_on(cluster, namespace).get("threefs-storage-3"),
        STEP_SECONDS,
    )
    seen = wait_progress(cluster, namespace, seen)

    # Another specification of every service, whose pods are replaced one at a time.
    before = pod_uids(cluster, namespace)
    requests = {"resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}
    change(cluster, namespace, {"mgmtd": requests, "meta": requests, "storage": requests})
    started_at = time.monotonic()
    wait_changed(cluster, namespace)
    record("threefs_cluster", "upgrade_seconds", time.monotonic() - started_at)
    assert status(cluster, namespace)["ready"] == "6/6"
    after = pod_uids(cluster, namespace)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    seen = wait_progress(cluster, namespace, seen)

    # The service with the highest ordinal is drained before its pod is removed.
    change(cluster, namespace, {"storage": {"replicas": 3}})
    wait_settled(cluster, namespace, 3)
    assert "threefs-storage-3" not in pod_uids(cluster, namespace)
    assert "threefs-storage-3" not in replicas_on(cluster, namespace)
    wait_progress(cluster, namespace, seen)

    volumes.sh(cluster, namespace, "writer", ENDS)
    for pod in ("writer", "reader"):
        stored = volumes.sh(cluster, namespace, pod, "cat /volume/lines").split()
        assert stored == [str(number) for number in range(len(stored))], "no line is missing"
    assert "wrong" not in volumes.sh(cluster, namespace, "reader", "ls /volume").split()

    delete_all(cluster, namespace)
    assert not cluster.get("statefulsets", namespace=namespace)
    kept = [item["metadata"]["name"] for item in cluster.get("pvc", namespace=namespace)]
    assert {"data-threefs-mgmtd-0", "data-threefs-meta-0", "data-threefs-storage-3"} <= set(kept)


def replicas_on(cluster: Cluster, namespace: str) -> dict[str, int]:
    nodes = status(cluster, namespace).get("storageNodes") or []
    return {node["name"]: node["replicas"] for node in nodes}


def pod_uids(cluster: Cluster, namespace: str) -> dict[str, str]:
    pods = cluster.get("pods", namespace=namespace, selector="app.kubernetes.io/instance=main")
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in pods
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] != "threefs-drain"
    }


def delete_all(cluster: Cluster, namespace: str) -> None:
    """The volume first; then the ThreeFSCluster, whose claims stay."""
    gone = (f"--namespace={namespace}", "--ignore-not-found")
    cluster.kubectl("delete", "pod", "writer", "reader", *gone, deadline_s=STEP_SECONDS)
    cluster.kubectl("delete", "pvc", "data", *gone, deadline_s=STEP_SECONDS)
    wait_for("the volume to be gone", lambda: not claims_left(cluster), STEP_SECONDS)
    cluster.kubectl("delete", "threefscluster", NAME, *gone, deadline_s=STEP_SECONDS)
    wait_for("the services to be gone", lambda: not pod_uids(cluster, namespace), STEP_SECONDS)

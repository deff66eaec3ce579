"""Access modes of volumes: single pod, inline and read-only."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from threefs.csi.volumes.volume_id import directory_name

from e2e.lib import volumes
from e2e.lib.volumes import DRIVER, claim, directories, inline_pod, pod_with, wait_event
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from e2e.lib import chart
    from testcluster.handle import Cluster

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

MEBIBYTE = 1 << 20
SECONDS = 180.0
HERE, THERE = "node-a1", "node-b1"
TOUCH = "touch /volume/x 2>&1 || true"
EROFS = "Read-only file system"
OWN = f"/inline/{hashlib.sha256(HERE.encode()).hexdigest()[:16]}"  # inline volumes of that node


def pod_on_node(name: str, node: str, claim_name: str) -> dict[str, Any]:
    """A pod that reaches its kubelet without the scheduler, as a static pod does."""
    pod = pod_with(name, node, claim_name)
    pod["spec"]["nodeName"] = node
    return pod


def delete(cluster: Cluster, namespace: str, *pods: str) -> None:
    cluster.kubectl("delete", "pod", *pods, f"--namespace={namespace}", deadline_s=SECONDS)


def test_a_claim_for_one_pod_has_one_on_all_nodes(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster
    single_pod_claim = claim("single", "64Mi", "ReadWriteOncePod")
    cluster.apply(single_pod_claim, pod_with("first", HERE, "single"), namespace=namespace)
    cluster.wait_ready("first", namespace=namespace, deadline_s=SECONDS)
    volumes.sh(cluster, namespace, "first", "echo kept > /volume/file")

    # Kubernetes' scheduler keeps a second one waiting, and so does each kubelet; where the kubelet
    # does not know the first pod, the driver is called and refuses.
    late, same_node, elsewhere = "late", "same-node", "elsewhere"
    cluster.apply(
        pod_with(late, THERE, "single"),
        pod_on_node(same_node, HERE, "single"),
        pod_on_node(elsewhere, THERE, "single"),
        namespace=namespace,
    )
    refusals = {
        late: "ReadWriteOncePod",
        same_node: "ReadWriteOncePod access mode and is already in use by another pod",
        elsewhere: f"is restricted to one node at a time and node `{HERE}` uses it",
    }
    for pod, words in refusals.items():
        wait_event(cluster, namespace, f"pod/{pod}", words)
    pods = cluster.get("pods", namespace=namespace)
    phases = {item["metadata"]["name"]: item["status"]["phase"] for item in pods}
    assert phases == {
        "first": "Running",
        late: "Pending",
        same_node: "Pending",
        elsewhere: "Pending",
    }

    delete(cluster, namespace, same_node, elsewhere)
    delete(cluster, namespace, "first")
    cluster.wait_ready(late, namespace=namespace, deadline_s=SECONDS)
    assert volumes.sh(cluster, namespace, late, "cat /volume/file") == "kept\n"


def test_an_ephemeral_volume_has_the_lifetime_of_its_pod(
    release: chart.Release, namespace: str
) -> None:
    cluster = release.cluster
    cluster.apply(
        inline_pod("scratch", HERE, size="32Mi"),
        inline_pod("reader", HERE, read_only=True),
        inline_pod("wrong", THERE, path="/volumes"),
        namespace=namespace,
    )
    cluster.wait_ready("scratch", "reader", namespace=namespace, deadline_s=SECONDS)
    sh = partial(volumes.sh, cluster, namespace)
    sh("scratch", "echo own > /volume/file && sync /volume/file")
    assert sh("scratch", "cat /volume/file") == "own\n"
    assert int(sh("scratch", "df -B1 --output=size /volume | tail -1")) == 32 * MEBIBYTE
    fill = "dd if=/dev/zero of=/volume/large bs=1M count=48 conv=fsync 2>&1 || true"
    assert "quota" in sh("scratch", fill).lower()
    assert sh("reader", "ls -A /volume") == "", "the volume is empty"
    assert EROFS in sh("reader", TOUCH)
    wait_event(cluster, namespace, "pod/wrong", "unknown attribute `path`")

    claims = {pod: made_for(cluster, namespace, pod) for pod in ("scratch", "reader")}
    for name, uid in claims.values():
        assert name in directories(cluster, OWN)
        assert uid in cluster.run_on(HERE, "cat", "/proc/self/mounts")
    delete(cluster, namespace, "scratch", "reader", "wrong")
    for name, uid in claims.values():

        def is_removed(name: str = name, uid: str = uid) -> bool:
            is_mounted = uid in cluster.run_on(HERE, "cat", "/proc/self/mounts")
            return not is_mounted and name not in directories(cluster, OWN)

        wait_for(f"3FS to be rid of {name}", is_removed, SECONDS)


def made_for(cluster: Cluster, namespace: str, pod: str) -> tuple[str, str]:
    """The directory in 3FS for the name that the kubelet gave a pod's own volume; the pod's uid."""
    uid = cluster.get("pod", pod, namespace)["metadata"]["uid"]
    volume_data = f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/volume/vol_data.json"
    handle = json.loads(cluster.run_on(HERE, "cat", volume_data))["volumeHandle"]
    return directory_name(handle), uid


def test_volumes_are_read_only_if_declared(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster
    sh = partial(volumes.sh, cluster, namespace)
    cluster.apply(
        claim("data", "64Mi"),
        claim("empty", "64Mi", "ReadOnlyMany"),
        pod_with("writer", HERE, "data"),
        pod_with("reader", THERE, "data", read_only=True),
        pod_with("idle", THERE, "empty"),
        namespace=namespace,
    )
    cluster.wait_ready("writer", "reader", "idle", namespace=namespace, deadline_s=SECONDS)
    sh("writer", "echo text > /volume/file && mkdir /volume/folder && sync /volume/file")
    assert sh("reader", "cat /volume/file") == "text\n"
    for command in ("echo more >> /volume/file", "rm -f /volume/file", "mkdir /volume/folder/x"):
        assert EROFS in sh("reader", f"sh -c '{command}' 2>&1 || true"), command
    assert EROFS in sh("idle", TOUCH)

    # Existing data, for readers on every node: a PersistentVolume written by an administrator.
    volume = cluster.get("pvc", "data", namespace)["spec"]["volumeName"]
    handle = cluster.get("pv", volume)["spec"]["csi"]["volumeHandle"]
    volume_name = f"{namespace}-shown"
    persistent = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            "capacity": {"storage": "64Mi"},
            "accessModes": ["ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "csi": {"driver": DRIVER, "volumeHandle": handle},
        },
    }
    read_only_claim = claim("shown", "64Mi", "ReadOnlyMany")
    read_only_claim["spec"] |= {"storageClassName": "", "volumeName": volume_name}
    try:
        cluster.apply(
            persistent, read_only_claim, pod_with("guest", "node-s1", "shown"), namespace=namespace
        )
        cluster.wait_ready("guest", namespace=namespace, deadline_s=SECONDS)
        assert sh("guest", "cat /volume/file") == "text\n"
        assert EROFS in sh("guest", TOUCH)
        delete(cluster, namespace, "guest")
    finally:
        cluster.kubectl("delete", "pv", volume_name, "--ignore-not-found", "--wait=false")
    assert sh("writer", "ls /volume") == "file\nfolder\n", "readers did not write"

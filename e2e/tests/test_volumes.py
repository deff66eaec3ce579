"""Claims of the chart's StorageClass on real kubelets: written here, read there, grown, gone."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from e2e import chart
from e2e.cluster.handle import wait_for
from e2e.tests.figures import figure
from e2e.tests.pods import sleeper

if TYPE_CHECKING:
    from e2e.cluster.handle import Cluster

# Images are built the first time.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

MEBIBYTE = 1 << 20
SECONDS = 180.0
WRITER, READER = "node-a1", "node-b1"


def claim(name: str, size: str) -> dict[str, Any]:
    """A claim that pods on all nodes may write."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": "threefs",
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": size}},
        },
    }


def pod_with(name: str, node: str, claim_name: str) -> dict[str, Any]:
    """A pod that does nothing, with this claim at /volume."""
    pod = sleeper(name, node)
    volume = {"name": "volume", "persistentVolumeClaim": {"claimName": claim_name}}
    pod["spec"]["volumes"] = [volume]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "volume", "mountPath": "/volume"}]
    return pod


def directories(cluster: Cluster) -> str:
    """What 3FS has below /volumes; asked where its cluster file is."""
    return cluster.kubectl(
        "exec", f"--namespace={chart.NAMESPACE}", "daemonset/threefs-csi-holder", "--",
        "threefs", "ls", "--cluster=/etc/threefs/clusters/default", "/volumes",
    )  # fmt: skip


def test_a_claim_is_shared_by_nodes_grows_and_leaves_nothing(
    storage_release: chart.Release, namespace: str
) -> None:
    cluster = storage_release.cluster

    def sh(pod: str, command: str) -> str:
        words = ("--", "sh", "-c", command)
        return cluster.kubectl("exec", f"--namespace={namespace}", pod, *words)

    began = time.monotonic()
    cluster.apply(
        claim("data", "64Mi"),
        pod_with("writer", WRITER, "data"),
        pod_with("reader", READER, "data"),
        namespace=namespace,
    )
    cluster.wait_ready("writer", namespace=namespace, deadline_s=SECONDS)
    sh("writer", "echo first > /volume/byte")
    figure("volumes", "claim_to_first_byte_seconds", time.monotonic() - began)
    cluster.wait_ready("reader", namespace=namespace, deadline_s=SECONDS)
    assert sh("reader", "cat /volume/byte") == "first\n"
    sh("reader", "echo second >> /volume/byte && mkdir /volume/sub && mv /volume/byte /volume/sub/")
    assert sh("writer", "cat /volume/sub/byte") == "first\nsecond\n"

    # The claim's size is what df shows and what can be written.
    size = "df -B1 --output=size /volume | tail -1"
    assert int(sh("writer", size)) == 64 * MEBIBYTE
    fill = "dd if=/dev/zero of=/volume/large bs=1M count=96 conv=fsync 2>&1 || true"
    assert "quota" in sh("reader", fill).lower()

    larger = {"spec": {"resources": {"requests": {"storage": "256Mi"}}}}
    name = f"--namespace={namespace}"
    cluster.kubectl("patch", "pvc", "data", name, f"--patch={json.dumps(larger)}")
    wait_for("the larger size", lambda: int(sh("writer", size)) == 256 * MEBIBYTE, SECONDS)
    assert "quota" not in sh("reader", fill).lower()
    wait_for(
        "the claim to say so",
        lambda: cluster.get("pvc", "data", namespace)["status"]["capacity"]["storage"] == "256Mi",
        SECONDS,
    )

    volume = cluster.get("pvc", "data", namespace)["spec"]["volumeName"]
    assert volume in directories(cluster)
    cluster.kubectl("delete", "pod", "writer", "reader", name, deadline_s=SECONDS)
    cluster.kubectl("delete", "pvc", "data", name, deadline_s=SECONDS)
    wait_for("no volume", lambda: volume not in cluster.kubectl("get", "pv"), SECONDS)
    assert volume not in directories(cluster)
    for node in (WRITER, READER):

        def unmounted(node: str = node) -> bool:
            return volume not in cluster.run_on(node, "cat", "/proc/self/mounts")

        wait_for(f"no mount on {node}", unmounted, SECONDS)

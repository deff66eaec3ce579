"""Claims of the chart's StorageClass on real kubelets: shared, expanded, deleted."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from e2e.lib import chart, volumes
from e2e.lib.volumes import claim, directories, pod_with, wait_event
from testcluster.handle import wait_for
from testcluster.measurements import record

# Images are built the first time.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

MEBIBYTE = 1 << 20
SECONDS = 180.0
WRITER, READER = "node-a1", "node-b1"
FILES, BLOCKS = 50, 100  # that each of two writers makes at the same time


def test_a_claim_is_shared_by_nodes_grows_and_leaves_nothing(
    release: chart.Release, namespace: str
) -> None:
    cluster = release.cluster

    def sh(pod: str, command: str) -> str:
        return volumes.sh(cluster, namespace, pod, command)

    started_at = time.monotonic()
    cluster.apply(
        claim("data", "64Mi"),
        pod_with("writer", WRITER, "data"),
        pod_with("reader", READER, "data"),
        namespace=namespace,
    )
    cluster.wait_ready("writer", namespace=namespace, deadline_s=SECONDS)
    sh("writer", "echo first > /volume/byte")
    record("volumes", "claim_to_first_byte_seconds", time.monotonic() - started_at, most=3)
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


def test_three_nodes_share_a_claim_and_two_write_it(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster
    pods = {"one": "node-a1", "two": "node-b1", "three": "node-s1"}
    pod_objects = [pod_with(name, node, "shared") for name, node in pods.items()]
    # What the third one mounts it may not write.
    pod_objects[2]["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] = True
    cluster.apply(claim("shared", "64Mi"), *pod_objects, namespace=namespace)
    cluster.wait_ready(*pods, namespace=namespace, deadline_s=SECONDS)

    def write(pod: str) -> None:
        """Separate files, and every second block of a shared file."""
        first = 0 if pod == "one" else 1
        own = f"for i in $(seq {FILES}); do echo {pod} $i > /volume/{pod}-$i; done"
        dd = "dd of=/volume/both bs=512 count=1 conv=notrunc,sync status=none"
        both = f"for i in $(seq {first} 2 {2 * BLOCKS - 1}); do echo {pod} $i | {dd} seek=$i; done"
        volumes.sh(cluster, namespace, pod, f"{own}; {both}; sync")

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(write, pod) for pod in ("one", "two")]:
            future.result()
    reader = partial(volumes.sh, cluster, namespace, "three")
    for pod in ("one", "two"):
        lines = reader(f"cd /volume && cat $(ls -v {pod}-*)").splitlines()
        assert lines == [f"{pod} {i + 1}" for i in range(FILES)]
    blocks = reader("tr -d '\\0' < /volume/both").splitlines()
    assert blocks == [f"{('one', 'two')[i % 2]} {i}" for i in range(2 * BLOCKS)], "nothing lost"
    assert "Read-only" in reader("touch /volume/x 2>&1 || true")


def test_a_released_single_node_claim_can_move_to_another_node(
    release: chart.Release, namespace: str
) -> None:
    cluster = release.cluster
    own_claim = claim("own", "64Mi", "ReadWriteOnce")
    cluster.apply(own_claim, pod_with("first", WRITER, "own"), namespace=namespace)
    cluster.wait_ready("first", namespace=namespace, deadline_s=SECONDS)
    volumes.sh(cluster, namespace, "first", "echo kept > /volume/file")
    cluster.apply(pod_with("second", READER, "own"), namespace=namespace)
    refusal = f"is restricted to one node at a time and node `{WRITER}` uses it"
    wait_event(cluster, namespace, "pod/second", refusal)
    name = f"--namespace={namespace}"
    cluster.kubectl("delete", "pod", "first", name, deadline_s=SECONDS)
    cluster.wait_ready("second", namespace=namespace, deadline_s=SECONDS)
    assert volumes.sh(cluster, namespace, "second", "cat /volume/file") == "kept\n"


def test_a_killed_fuse_daemon_is_replaced_while_its_pod_runs(
    release: chart.Release, namespace: str
) -> None:
    cluster = release.cluster
    cluster.apply(claim("data", "64Mi"), pod_with("pod", WRITER, "data"), namespace=namespace)
    cluster.wait_ready("pod", namespace=namespace, deadline_s=SECONDS)
    before = cluster.get("pod", "pod", namespace)["status"]["containerStatuses"][0]
    volumes.sh(cluster, namespace, "pod", "echo before > /volume/open && sync /volume/open")
    assert not volumes.condition(release, namespace, "pod", "data")[0]

    volumes.signal_daemon(release, namespace, "data", WRITER, "KILL")

    def replaced() -> bool:
        abnormal, message = volumes.condition(release, namespace, "pod", "data")
        return not abnormal and "replaced 1 times" in message

    wait_for("the condition to say so", replaced, SECONDS)
    volumes.sh(cluster, namespace, "pod", "echo after >> /volume/open && sync /volume/open")
    assert volumes.sh(cluster, namespace, "pod", "cat /volume/open") == "before\nafter\n"
    after = cluster.get("pod", "pod", namespace)["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], 0)

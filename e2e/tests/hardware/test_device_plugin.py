"""The device plugin under a real kubelet: pairs, environment, a lost GPU, kubelet restarts."""

from __future__ import annotations

import json
import statistics
import time
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib.chart import NAMESPACE
from e2e.lib.pods import sleeper
from testcluster import handle
from testcluster.handle import Cluster, KubectlError
from testcluster.measurements import record

if TYPE_CHECKING:
    from e2e.lib import chart
    from e2e.lib.hardware import FakeHardware

NODE = "node-a1"
GPU = "fireflyer.dev/gpu"
CLASSES = ("rdma-hfreduce", "rdma-nccl", "rdma-storage")
RESTARTS = 20
# Twenty restarts of a kubelet take a minute, and several on a machine that does other things too.
pytestmark = pytest.mark.timeout(900)
wait_for = partial(handle.wait_for, deadline_s=180)


@pytest.fixture
def hardware(release: chart.Release, machines: dict[str, FakeHardware]) -> FakeHardware:
    """That of the node, with the chart's agent on it."""
    machines[NODE].driver.write()
    return machines[NODE]


@pytest.fixture
def agent(release: chart.Release) -> str:
    """The agent's pod."""
    (pod,) = release.pods("node-agent", NODE)
    return str(pod["metadata"]["name"])


def allocatable(cluster: Cluster, resource: str = GPU) -> int:
    return int(cluster.get("node", NODE)["status"]["allocatable"].get(resource, -1))


def health(cluster: Cluster) -> dict[str, Any]:
    status: dict[str, Any] = cluster.get("nodehealth", NODE).get("status", {})
    return status


def environment(cluster: Cluster, pod: str, namespace: str) -> dict[str, str]:
    text = cluster.kubectl(f"--namespace={namespace}", "exec", pod, "--", "env")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def asking(name: str, **resources: int) -> dict[str, Any]:
    pod = sleeper(name, NODE)
    limits = {f"fireflyer.dev/{key.replace('_', '-')}": value for key, value in resources.items()}
    pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    return pod


def test_every_resource_becomes_allocatable(cluster: Cluster, hardware: FakeHardware) -> None:
    wait_for("8 GPUs", lambda: allocatable(cluster) == 8 or None)
    for name in (*(f"fireflyer.dev/{device_class}" for device_class in CLASSES), "rdma/hca"):
        assert allocatable(cluster, name) == 64
    status = wait_for("NodeHealth", lambda: health(cluster) or None)
    assert (status["state"], status["inventory"]["gpus"]) == ("Healthy", 8)
    assert status["inventory"]["bridgePairs"] == 4


def test_pods_get_whole_pairs_devices_and_the_fields_of_their_traffic_classes(
    cluster: Cluster, hardware: FakeHardware, namespace: str
) -> None:
    wait_for("8 GPUs", lambda: allocatable(cluster) == 8 or None)
    pods = [
        asking("one", gpu=4, rdma_hfreduce=1, rdma_nccl=1, rdma_storage=1),
        asking("two", gpu=2, rdma_hfreduce=1),
    ]
    own = {"name": "NCCL_IB_SL", "value": "7"}
    pods.append(asking("own", rdma_nccl=1))
    pods[2]["spec"]["containers"][0]["env"] = [own]
    cluster.apply(*pods, namespace=namespace)
    cluster.wait_ready("one", "two", "own", namespace=namespace)
    allocated: set[str] = set()
    for pod, count in (("one", 4), ("two", 2)):
        values = environment(cluster, pod, namespace)
        gpus = set(values["FLYER_GPUS"].split(","))
        pairs = [set(pair.split("+")) for pair in values["FLYER_GPU_PAIRS"].split(",")]
        assert len(gpus) == count
        assert len(pairs) == count // 2
        assert set().union(*pairs) == gpus, "whole pairs"
        assert not gpus & allocated
        allocated |= gpus
        assert values["FLYER_HFREDUCE_SERVICE_LEVEL"] == "2"
        listed = cluster.kubectl(
            *(f"--namespace={namespace}", "exec", pod, "--", "sh", "-c"), "ls /dev /dev/infiniband"
        ).split()
        cards = [name for name in listed if name.removeprefix("nvidia").isdecimal()]
        assert len([name for name in cards if name.startswith("nvidia")]) == count
        assert {"nvidiactl", "uverbs0", "rdma_cm"} <= set(listed)
    values = environment(cluster, "one", namespace)
    assert values["NCCL_IB_SL"] == values["UCX_IB_SL"] == "1"
    assert values["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert values["FLYER_STORAGE_SERVICE_LEVEL"] == "3"
    topology = cluster.kubectl(
        *(f"--namespace={namespace}", "exec", "one", "--", "cat"), values["NCCL_TOPO_FILE"]
    )
    assert topology.startswith('<system version="1">')
    assert "FLYER_NCCL_SERVICE_LEVEL" not in environment(cluster, "two", namespace)
    assert environment(cluster, "own", namespace)["NCCL_IB_SL"] == "7", "the pod's own value wins"
    cluster.kubectl(f"--namespace={namespace}", "delete", "pod", "one", "two", "own", "--wait=true")


def test_a_gpu_with_xid_79_is_withdrawn_until_its_reset(
    cluster: Cluster, hardware: FakeHardware, agent: str
) -> None:
    wait_for("8 GPUs", lambda: allocatable(cluster) == 8 or None)
    bad_gpu = hardware.driver.node.gpus[5].uuid
    started = time.monotonic()
    hardware.driver.fall_off_the_bus(5)
    status = wait_for(
        "NodeHealth",
        lambda: (
            health_status if (health_status := health(cluster))["state"] == "Unhealthy" else None
        ),
    )
    seconds = time.monotonic() - started
    wait_for("7 GPUs", lambda: allocatable(cluster) == 7 or None)
    elapsed = time.monotonic() - started
    device = next(item for item in status["devices"] if item["id"] == bad_gpu)
    assert (device["state"], device["kind"]) == ("Unhealthy", "GPU")
    assert device["reason"] in ("Xid79", "GpuLost")
    assert device["recovery"]
    hardware.driver.reset(5)
    wait_for("8 GPUs again", lambda: allocatable(cluster) == 8 or None)
    wait_for("health", lambda: health(cluster)["state"] == "Healthy" or None)
    codes = {fault["code"] for fault in health(cluster)["faults"]}
    assert "Xid79" in codes, "the cause is kept"
    pod = cluster.get("pod", agent, NAMESPACE)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    record("device_plugin", "xid_to_node_health_seconds", seconds)
    record("device_plugin", "xid_to_allocatable_seconds", elapsed, most=2)


MEMORY = """
import pathlib
total = 0
for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdecimal():
        try:
            command = (folder / "cmdline").read_bytes()
            if b"flyer-node" in command or b"flyer_node.hardware.worker" in command:
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(int(x.split()[1]) for x in lines if x.startswith("Pss:"))
        except OSError:
            pass
print(total)
"""
"""Proportional set size in KiB of the agent and its worker: shared pages count once."""


def test_the_agent_is_small(cluster: Cluster, hardware: FakeHardware, agent: str) -> None:
    wait_for("8 GPUs", lambda: allocatable(cluster) == 8 or None)
    text = cluster.kubectl(
        *(f"--namespace={NAMESPACE}", "exec", agent, "--", "python3", "-c"), MEMORY
    )
    mebibytes = int(text) / 1024
    record("device_plugin", "agent_and_worker_mebibytes", mebibytes, most=80)
    assert 10 < mebibytes < 80


def registrations(cluster: Cluster, agent: str) -> list[tuple[float, str]]:
    """Times and resources of the agent's registrations, from its log."""
    try:
        lines = cluster.kubectl(f"--namespace={NAMESPACE}", "logs", agent).splitlines()
    except KubectlError:  # the kubelet that serves the log is just starting
        return []
    reported = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        (datetime.fromisoformat(registration["timestamp"]).timestamp(), registration["resource"])
        for registration in reported
        if registration["event"] == "registered"
    ]


@pytest.mark.usefixtures("node_processes")
def test_kubelet_restarts_are_survived_and_containers_keep_their_gpus(
    cluster: Cluster,
    hardware: FakeHardware,
    agent: str,
    namespace: str,
) -> None:
    wait_for("8 GPUs", lambda: allocatable(cluster) == 8 or None)
    cluster.apply(asking("keeper", gpu=2), namespace=namespace)
    cluster.wait_ready("keeper", namespace=namespace)
    before = environment(cluster, "keeper", namespace)["FLYER_GPUS"]
    kubelet = cluster.process(f"{NODE}-kubelet")
    took: list[float] = []
    for _ in range(RESTARTS):
        old = hardware.kubelet_socket.lstat().st_mtime_ns
        kubelet.restart()

        def new_socket(old: int = old) -> float | None:
            try:
                fresh = hardware.kubelet_socket.lstat().st_mtime_ns
            except FileNotFoundError:
                return None
            return fresh / 1e9 if fresh != old else None

        created_at = wait_for("the kubelet's socket", new_socket)

        def all_registered(since: float = created_at) -> float | None:
            after = {name: at for at, name in registrations(cluster, agent) if at >= since}
            return max(after.values()) if len(after) == 5 else None

        took.append(wait_for("5 registrations", all_registered) - created_at)
    wait_for("8 GPUs", lambda: allocatable(cluster) == 8 or None)
    after = environment(cluster, "keeper", namespace)["FLYER_GPUS"]
    assert after == before
    pod = cluster.get("pod", "keeper", namespace)
    assert pod["status"]["phase"] == "Running"
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    cluster.apply(asking("later", gpu=6), namespace=namespace)
    cluster.wait_ready("later", namespace=namespace)
    own_gpus = set(environment(cluster, "later", namespace)["FLYER_GPUS"].split(","))
    assert not own_gpus & set(before.split(",")), "nothing is given out twice"
    cluster.kubectl(f"--namespace={namespace}", "delete", "pod", "keeper", "later", "--wait=true")
    record("device_plugin", "registered_seconds_median", statistics.median(took))
    record("device_plugin", "registered_seconds_max", max(took), most=2)
    # The goal is 2 s; a loaded machine gets more before the test calls it broken.
    assert max(took) < 30

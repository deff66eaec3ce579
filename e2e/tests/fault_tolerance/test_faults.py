"""Fault injection, one fault at a time, with jobs on real kubelets."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib.chart import NAMESPACE
from e2e.lib.jobs import END_SECONDS, job, pods_of, status, step, wait_phase, wait_step
from e2e.workloads import counting
from testcluster.control_plane import API_SERVER, wait_ready
from testcluster.handle import wait_for
from testcluster.measurements import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.lib.hardware import FakeHardware
    from testcluster.handle import Cluster

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("release"),
]

SCRIPT = Path(counting.__file__).read_text()
ENDLESS = 1_000_000
AWAY_SECONDS = 60.0


def counter(name: str, nodes: int, steps: int = ENDLESS, **spec: Any) -> dict[str, Any]:
    """A job that counts."""
    return job(name, nodes, SCRIPT, str(steps), nodeClass="a100", **spec)


def uids(cluster: Cluster, name: str, namespace: str) -> set[str]:
    """Its pods."""
    return {pod["metadata"]["uid"] for pod in pods_of(cluster, name, namespace)}


def attempts(cluster: Cluster, name: str, namespace: str) -> tuple[int, int]:
    """Its attempt, and how many of them were restarts."""
    history = status(cluster, name, namespace)["history"]
    return history["attempt"], history.get("restarts", 0)


def test_a_minute_without_api_server_does_not_affect_jobs(cluster: Cluster, namespace: str) -> None:
    cluster.apply(counter("steady", 2), namespace=namespace)
    step_before = wait_step(cluster, "steady", namespace, 10)
    before = uids(cluster, "steady", namespace)
    server = cluster.process(API_SERVER)
    server.kill()
    # Longer than the node grace period: all nodes count as lost when it is back.
    time.sleep(AWAY_SECONDS)
    server.start()
    wait_ready(cluster.state)
    wait_step(cluster, "steady", namespace, step_before + 40)
    assert uids(cluster, "steady", namespace) == before
    assert attempts(cluster, "steady", namespace) == (1, 0)
    # Users can still change it once the policies of the server have the kind again; 503 until then.
    words = ("patch", "flyerjob", "steady", f"--namespace={namespace}", "--type=merge")
    patch = '--patch={"spec": {"suspend": true}}'
    wait_for("the server takes wishes", partial(cluster.kubectl, *words, patch), END_SECONDS)
    job_status = wait_phase(cluster, "steady", namespace, "Suspended")
    assert job_status["eviction"]["lostSteps"] == 0


def test_concurrent_leaders_do_not_affect_jobs(cluster: Cluster, namespace: str) -> None:
    cluster.apply(counter("ruled", 2), namespace=namespace)
    step_before = wait_step(cluster, "ruled", namespace, 10)
    before = uids(cluster, "ruled", namespace)

    def transitions() -> int:
        return int(cluster.get("lease", "flyer-operator", NAMESPACE)["spec"]["leaseTransitions"])

    def rises(epoch: int) -> bool:
        return transitions() > epoch

    for _ in range(3):
        epoch = transitions()
        # The old leader leads until its next renewal; the other replica leads immediately.
        released = '--patch={"spec": {"holderIdentity": ""}}'
        words = ("patch", "lease", "flyer-operator", f"--namespace={NAMESPACE}", "--type=merge")
        cluster.kubectl(*words, released)
        wait_for("a leader", partial(rises, epoch), END_SECONDS)
        step_before = wait_step(cluster, "ruled", namespace, step_before + 10)
    assert uids(cluster, "ruled", namespace) == before
    assert attempts(cluster, "ruled", namespace) == (1, 0)
    words = ("patch", "flyerjob", "ruled", f"--namespace={namespace}", "--type=merge")
    cluster.kubectl(*words, '--patch={"spec": {"suspend": true}}')
    job_status = wait_phase(cluster, "ruled", namespace, "Suspended")
    assert job_status["eviction"]["lostSteps"] == 0


def test_a_pod_deleted_by_hand_restarts_the_gang(cluster: Cluster, namespace: str) -> None:
    cluster.apply(counter("hurt", 3), namespace=namespace)
    step_before = wait_step(cluster, "hurt", namespace, counting.SAVE_STEPS + 1)
    (pod,) = pods_of(cluster, "hurt", namespace, attempt=1, node_rank=1)
    words = ("delete", "pod", pod["metadata"]["name"], f"--namespace={namespace}")
    # Its rank would take all of the job's grace.
    cluster.kubectl(*words, "--grace-period=1", deadline_s=END_SECONDS)
    job_status = wait_phase(cluster, "hurt", namespace, "Running", attempt=2)
    # Ranks that can save within the second do, lose nothing, and leave as from a drained node.
    saved = job_status["eviction"].get("suspendCode") == 3
    assert job_status["history"]["restarts"] == (0 if saved else 1), job_status["eviction"]
    assert job_status["eviction"]["reason"] == ("Requeued" if saved else "PodKilled")
    steps_max = 0 if saved else counting.SAVE_STEPS + 1 / counting.STEP_SECONDS
    assert job_status["eviction"]["lostSteps"] <= steps_max
    wait_step(cluster, "hurt", namespace, step_before + 20)
    living = [
        item
        for item in pods_of(cluster, "hurt", namespace)
        if item["status"]["phase"] not in ("Succeeded", "Failed")
    ]
    assert {item["metadata"]["labels"]["fireflyer.dev/attempt"] for item in living} == {"2"}
    assert len(living) == 3


def test_deleting_the_namespace_of_a_running_job_releases_all_resources(
    cluster: Cluster, namespace: str
) -> None:
    doomed = f"doomed-{os.urandom(3).hex()}"
    cluster.kubectl("create", "namespace", doomed)
    cluster.apply(counter("wide", 4), namespace=doomed)
    wait_step(cluster, "wide", doomed, 5)
    assert status(cluster, "wide", doomed)["zones"] == "A+B"
    cluster.kubectl("delete", "namespace", doomed, deadline_s=END_SECONDS)
    # Four nodes and the one token for two zones.
    cluster.apply(counter("next", 4, steps=5), namespace=namespace)
    job_status = wait_phase(cluster, "next", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Succeeded", job_status


def test_a_gpu_with_xid_79_keeps_new_gangs_from_its_node(
    cluster: Cluster, machines: dict[str, FakeHardware], namespace: str
) -> None:
    cluster.apply(counter("goes-on", 2, crossZone="Never"), namespace=namespace)
    wait_step(cluster, "goes-on", namespace, 5)
    node = status(cluster, "goes-on", namespace)["assignment"]["nodes"][0]["name"]
    machine = machines[node]

    def state() -> str:
        return str(cluster.get("nodehealth", node).get("status", {}).get("state"))

    try:
        machine.driver.fall_off_the_bus(3)
        wait_for("the node to be unhealthy", lambda: state() == "Unhealthy", END_SECONDS)
        # A gang decides itself whether it can continue; this one continues.
        step_before = step(cluster, "goes-on", namespace)
        wait_step(cluster, "goes-on", namespace, step_before + 20)
        assert attempts(cluster, "goes-on", namespace) == (1, 0)
        cluster.kubectl("delete", "flyerjob", "goes-on", f"--namespace={namespace}")
        cluster.apply(counter("waits", 4, steps=5), namespace=namespace)

        def pending() -> str:
            return str((status(cluster, "waits", namespace).get("pending") or {}).get("message"))

        wait_for("the reason why it waits", lambda: node in pending(), END_SECONDS)
        assert not pods_of(cluster, "waits", namespace)
    finally:
        machine.driver.reset(3)
    wait_for("the node to be healthy", lambda: state() == "Healthy", END_SECONDS)
    job_status = wait_phase(cluster, "waits", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Succeeded", job_status


@pytest.fixture
def dead_kubelet(cluster: Cluster) -> Iterator[str]:
    """An empty node with a killed kubelet, not detected yet; restarted at the end."""
    # Pods of earlier jobs would remain on it permanently.
    words = ("get", "pods", "--all-namespaces", "--selector=fireflyer.dev/job", "--output=name")
    remaining_pods = partial(cluster.kubectl, *words, "--field-selector=spec.nodeName=node-b2")
    wait_for("node-b2 to be empty", lambda: not remaining_pods().strip(), END_SECONDS)
    kubelet = cluster.process("node-b2-kubelet")
    kubelet.kill()
    yield "node-b2"
    if not kubelet.pids():
        kubelet.start()


def test_a_gang_is_rolled_back_if_a_node_fails_between_assignment_and_start(
    cluster: Cluster, dead_kubelet: str, namespace: str
) -> None:
    cluster.apply(counter("early", 4, steps=20), namespace=namespace)
    job_status = wait_phase(cluster, "early", namespace, "Starting")
    assert dead_kubelet in [node["name"] for node in job_status["assignment"]["nodes"]]
    wait_for(
        "the loss to be seen",
        lambda: (status(cluster, "early", namespace).get("eviction") or {}).get("attempt") == 1,
        END_SECONDS,
    )
    evicted = status(cluster, "early", namespace)
    assert evicted["eviction"]["reason"] == "NodeFailures", evicted["eviction"]
    # The other nodes are released: no gang runs partially.
    wait_for(
        "the nodes that live to be empty",
        lambda: (
            {node["name"] for node in status(cluster, "early", namespace)["occupied"]}
            <= {dead_kubelet}
        ),
        END_SECONDS,
    )
    cluster.process(f"{dead_kubelet}-kubelet").start()
    final_status = wait_phase(cluster, "early", namespace, "Succeeded", "Failed")
    assert final_status["phase"] == "Succeeded", final_status


def test_a_power_cut_costs_a_gang_only_the_detection_time(cluster: Cluster, namespace: str) -> None:
    cluster.apply(counter("moves", 2, crossZone="Never"), namespace=namespace)
    wait_step(cluster, "moves", namespace, counting.SAVE_STEPS + 1)
    before = status(cluster, "moves", namespace)["assignment"]["nodes"]
    victim = before[1]["name"]
    machine = cluster.machine(victim)
    started_at = time.monotonic()
    machine.power_off()
    try:
        job_status = wait_phase(cluster, "moves", namespace, "Running", attempt=2)
        record("faults", "power_cut_to_running_seconds", time.monotonic() - started_at, most=10)
        assert victim not in [node["name"] for node in job_status["assignment"]["nodes"]]
        step_before = step(cluster, "moves", namespace)
        wait_step(cluster, "moves", namespace, step_before + 10)
    finally:
        machine.power_on()
    cluster.kubectl(
        "wait", "--for=condition=Ready", f"node/{victim}", "--timeout=120s", deadline_s=130
    )
    # It is used again.
    cluster.kubectl("delete", "flyerjob", "moves", f"--namespace={namespace}")
    cluster.apply(counter("all", 4, steps=5), namespace=namespace)
    final_status = wait_phase(cluster, "all", namespace, "Succeeded", "Failed")
    assert final_status["phase"] == "Succeeded", final_status

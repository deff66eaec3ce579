"""The smallest jobs, from `kubectl apply` to their end, through the whole stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from e2e.lib.jobs import job, pods_of, wait_phase

if TYPE_CHECKING:
    from e2e.lib import chart
    from testcluster.handle import Cluster

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = pytest.mark.timeout(900)

SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_gang_runs_to_its_end(
    cluster: Cluster, release: chart.Release, namespace: str, nodes: int
) -> None:
    cluster.apply(job("hello", nodes, SAY), namespace=namespace)
    job_status = wait_phase(cluster, "hello", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Succeeded", (job_status, release.diagnosis())
    pods = pods_of(cluster, "hello", namespace)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == nodes
    outputs = {
        cluster.kubectl("logs", pod["metadata"]["name"], f"--namespace={namespace}") for pod in pods
    }
    for rank in range(nodes):
        assert any(f"rank {rank} of {nodes}" in text for text in outputs), outputs


def test_on_a_shared_node_the_kubernetes_scheduler_places_the_pod(
    cluster: Cluster, release: chart.Release, namespace: str
) -> None:
    """The operator decides on the node, and takes its gate away; it does not bind there."""
    cluster.apply(job("shares", 1, SAY, nodeClass="shared"), namespace=namespace)
    job_status = wait_phase(cluster, "shares", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Succeeded", (job_status, release.diagnosis())
    (pod,) = pods_of(cluster, "shares", namespace)
    assert [node["name"] for node in job_status["assignment"]["nodes"]] == ["node-s1"]
    assert pod["spec"]["nodeName"] == "node-s1"
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert not pod["spec"].get("schedulingGates")
    name = pod["metadata"]["name"]
    events = cluster.kubectl(
        "get", "events", f"--namespace={namespace}",
        f"--field-selector=reason=Scheduled,involvedObject.name={name}",
        "--output=jsonpath={.items[*].reportingComponent}",
    )  # fmt: skip
    assert events.split() == ["default-scheduler"]


def test_a_failing_rank_fails_the_job(
    cluster: Cluster, release: chart.Release, namespace: str
) -> None:
    cluster.apply(job("broken", 1, "raise SystemExit(3)"), namespace=namespace)
    job_status = wait_phase(cluster, "broken", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Failed", job_status

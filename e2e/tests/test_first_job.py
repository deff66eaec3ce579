"""The smallest jobs, by `kubectl apply`, through the whole stack to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from e2e.cluster.handle import wait_for
from e2e.tests.pods import TRAIN_IMAGE

if TYPE_CHECKING:
    from e2e import chart
    from e2e.cluster.handle import Cluster

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = pytest.mark.timeout(900)

SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
END_DEADLINE_S = 240.0


def job(name: str, nodes: int, script: str, **spec: Any) -> dict[str, Any]:
    """A FlyerJob that runs this Python on every rank."""
    container = {"name": "train", "image": TRAIN_IMAGE, "command": ["python3", "-c", script]}
    return {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": nodes,
            "ranksPerNode": 1,
            **spec,
            "template": {"spec": {"containers": [container]}},
        },
    }


def wait_phase(cluster: Cluster, name: str, namespace: str, *phases: str) -> Any:
    """Waits for one of these phases; the job as it then is."""

    def probe() -> Any:
        found = cluster.get("flyerjob", name, namespace)
        return found if found.get("status", {}).get("phase") in phases else None

    try:
        return wait_for(f"{name} to be {' or '.join(phases)}", probe, END_DEADLINE_S)
    except AssertionError as error:
        status = cluster.get("flyerjob", name, namespace).get("status")
        events = cluster.kubectl("events", f"--namespace={namespace}")
        raise AssertionError(f"{error}\n{status}\n{events}") from None


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_gang_runs_to_its_end(
    cluster: Cluster, operator_release: chart.Release, namespace: str, nodes: int
) -> None:
    cluster.apply(job("hello", nodes, SAY), namespace=namespace)
    done = wait_phase(cluster, "hello", namespace, "Succeeded", "Failed")
    assert done["status"]["phase"] == "Succeeded", (done["status"], operator_release.diagnosis())
    pods = cluster.get("pods", namespace=namespace, selector="fireflyer.dev/job=hello")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == nodes
    said = {
        cluster.kubectl("logs", pod["metadata"]["name"], f"--namespace={namespace}") for pod in pods
    }
    for rank in range(nodes):
        assert any(f"rank {rank} of {nodes}" in text for text in said), said


def test_a_failing_rank_fails_the_job(
    cluster: Cluster, operator_release: chart.Release, namespace: str
) -> None:
    cluster.apply(job("broken", 1, "raise SystemExit(3)"), namespace=namespace)
    done = wait_phase(cluster, "broken", namespace, "Succeeded", "Failed")
    assert done["status"]["phase"] == "Failed", done["status"]

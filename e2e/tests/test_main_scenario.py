"""The story that the suite is for: a training run over two zones gives way and loses nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e.cluster.handle import wait_for
from e2e.tests import training
from e2e.tests.figures import figure
from e2e.tests.pods import TRAIN_IMAGE
from e2e.tests.test_first_job import wait_phase
from e2e.tests.test_volumes import claim, pod_with

if TYPE_CHECKING:
    from e2e import chart
    from e2e.cluster.handle import Cluster

# Images are built the first time.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

NODES = 4
STEPS, STEPS_URGENT = 900, 20
STEP_SECONDS = 0.05
SCRIPT = Path(training.__file__).read_text()
SECONDS = 300.0


def job(name: str, steps: int, priority: str, volume: dict[str, Any]) -> dict[str, Any]:
    """The training on four nodes; its folder in the volume is the job's name."""
    folder = f"/volume/{name}"
    container = {
        "name": "train",
        "image": TRAIN_IMAGE,
        "command": ["python3", "-c", SCRIPT, folder, str(steps), str(STEP_SECONDS)],
        "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
    }
    return {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": NODES,
            "group": "a100",
            "priority": priority,
            "preemption": {"grace": "60s", "maxGrace": "2m", "minRuntime": "0s"},
            "template": {
                "spec": {"containers": [container], "volumes": [{"name": "volume", **volume}]}
            },
        },
    }


def status(cluster: Cluster, name: str, namespace: str) -> dict[str, Any]:
    """What its object says."""
    return dict(cluster.get("flyerjob", name, namespace).get("status") or {})


def step(cluster: Cluster, name: str, namespace: str) -> int:
    """The last one that was reported."""
    return int((status(cluster, name, namespace).get("progress") or {}).get("step") or 0)


def test_a_preempted_run_over_two_zones_ends_with_the_same_bits(
    storage_release: chart.Release, namespace: str
) -> None:
    cluster = storage_release.cluster
    cluster.apply(claim("runs", "256Mi"), namespace=namespace)
    volume = {"persistentVolumeClaim": {"claimName": "runs"}}

    began = time.monotonic()
    cluster.apply(job("patient", STEPS, "normal", volume), namespace=namespace)
    wait_for("first steps", lambda: step(cluster, "patient", namespace) > 20, SECONDS)
    figure("main_scenario", "apply_to_steps_seconds", time.monotonic() - began)
    running = status(cluster, "patient", namespace)
    assert running["zones"] == "A+B"
    assert len(running["assignment"]["bridge"]) == 2

    began = time.monotonic()
    cluster.apply(job("urgent", STEPS_URGENT, "high", volume), namespace=namespace)
    wait_phase(cluster, "urgent", namespace, "Running", "Succeeded")
    figure("main_scenario", "urgent_apply_to_running_seconds", time.monotonic() - began)
    evicted = status(cluster, "patient", namespace)
    assert evicted["eviction"]["attempt"] == 1
    saved = evicted["checkpoint"]["step"]
    assert 20 < saved < STEPS
    assert evicted["eviction"]["suspendCode"] == 3
    assert evicted["eviction"]["lostSteps"] == 0

    done = wait_phase(cluster, "urgent", namespace, "Succeeded", "Failed")
    assert done["status"]["phase"] == "Succeeded", done["status"]
    done = wait_phase(cluster, "patient", namespace, "Succeeded", "Failed")["status"]
    assert done["phase"] == "Succeeded", done
    assert done["chain"]["attempt"] == 2
    assert done["chain"].get("restarts", 0) == 0
    assert done["progress"]["step"] == STEPS

    # Both attempts can be read: what was said is not gone with the nodes.
    selector = "fireflyer.dev/job=patient,fireflyer.dev/node-rank=0"
    first, second = (
        cluster.kubectl("logs", pod["metadata"]["name"], f"--namespace={namespace}")
        for pod in cluster.get("pods", namespace=namespace, selector=selector)
    )
    assert f"saved step {saved}" in first
    assert f"final {training.undisturbed(NODES, STEPS)}" in second

    # What a third party finds in the volume is what a run in one piece comes to.
    cluster.apply(pod_with("look", "node-b1", "runs"), namespace=namespace)
    cluster.wait_ready("look", namespace=namespace, deadline_s=SECONDS)

    def final(name: str) -> Any:
        words = (f"--namespace={namespace}", "look", "--", "cat", f"/volume/{name}/final.json")
        return json.loads(cluster.kubectl("exec", *words))

    def expected(steps: int) -> str:
        return training.undisturbed(NODES, steps)

    assert final("patient") == {"hash": expected(STEPS), "attempt": 2, "from_step": saved}
    assert final("urgent") == {"hash": expected(STEPS_URGENT), "attempt": 1, "from_step": 0}

"""FlyerJobs in tests: manifests, statuses, pods and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from e2e.lib.pods import TRAIN_IMAGE
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from testcluster.handle import Cluster

__all__ = [
    "END_SECONDS",
    "diagnosis",
    "job",
    "logs",
    "pods_of",
    "status",
    "step",
    "wait_phase",
    "wait_step",
]

T = TypeVar("T")

END_SECONDS = 300.0


def job(name: str, nodes: int, script: str, *arguments: str, **spec: Any) -> dict[str, Any]:
    """A FlyerJob that runs this Python on every rank."""
    command = ["python3", "-c", script, *arguments]
    # Without a request a container's share of the processor is next to nothing.
    requests = {"requests": {"cpu": "250m"}}
    container = {"name": "train", "image": TRAIN_IMAGE, "command": command, "resources": requests}
    return {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": nodes,
            "ranksPerNode": 1,
            "preemption": {
                "checkpointGracePeriod": "60s",
                "maxCheckpointGracePeriod": "2m",
                "minRuntime": "0s",
            },
            **spec,
            "template": {"spec": {"containers": [container]}},
        },
    }


def status(cluster: Cluster, name: str, namespace: str) -> dict[str, Any]:
    """The status of the job."""
    return dict(cluster.get("flyerjob", name, namespace).get("status") or {})


def step(cluster: Cluster, name: str, namespace: str) -> int:
    """The last one that was reported."""
    return int((status(cluster, name, namespace).get("progress") or {}).get("step") or 0)


def wait_step(cluster: Cluster, name: str, namespace: str, least: int) -> int:
    """Waits until the job has reached this step; returns its current step."""

    def probe() -> int | None:
        current = step(cluster, name, namespace)
        return current if current >= least else None

    return _waited(cluster, name, namespace, f"step {least}", probe)


def wait_phase(
    cluster: Cluster, name: str, namespace: str, *phases: str, attempt: int = 1
) -> dict[str, Any]:
    """Waits for one of these phases in this attempt or a later one; returns the status."""

    def probe() -> dict[str, Any] | None:
        job_status = status(cluster, name, namespace)
        late = (job_status.get("history") or {}).get("attempt", 0) >= attempt
        return job_status if late and job_status.get("phase") in phases else None

    return _waited(cluster, name, namespace, " or ".join(phases), probe)


def pods_of(cluster: Cluster, name: str, namespace: str, **labels: int) -> list[dict[str, Any]]:
    """Its pods; `attempt` and `node_rank` choose."""
    words = [f"fireflyer.dev/{key.replace('_', '-')}={value}" for key, value in labels.items()]
    selector = ",".join([f"fireflyer.dev/job={name}", *words])
    pods: list[dict[str, Any]] = cluster.get("pods", namespace=namespace, selector=selector)
    return pods


def logs(cluster: Cluster, name: str, namespace: str, **labels: int) -> str:
    """The logs of these pods."""
    return "".join(
        cluster.kubectl("logs", pod["metadata"]["name"], f"--namespace={namespace}")
        for pod in pods_of(cluster, name, namespace, **labels)
    )


def _waited(
    cluster: Cluster, name: str, namespace: str, description: str, probe: Callable[[], T | None]
) -> T:
    try:
        return wait_for(f"{name}: {description}", probe, END_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{diagnosis(cluster, namespace)}") from None


def diagnosis(cluster: Cluster, namespace: str) -> str:
    """Diagnostics for jobs of a namespace that do not progress."""
    namespaced = f"--namespace={namespace}"
    statuses = [
        f"{item['metadata']['name']}: {item.get('status')}"
        for item in cluster.get("flyerjobs", namespace=namespace)
    ]
    return "\n".join(
        [
            *statuses,
            cluster.kubectl("get", "pods", "--all-namespaces", "--output=wide"),
            cluster.kubectl("get", "nodes", "--show-labels"),
            *cluster.kubectl("events", namespaced).splitlines()[-40:],
            cluster.kubectl(
                *("logs", "--namespace=fireflyer-system", "--ignore-errors", "--tail=60"),
                *("--selector=app.kubernetes.io/component=operator", "--all-containers"),
            ),
        ]
    )

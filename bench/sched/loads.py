"""The objects of the loads: FlyerJobs, and the same gangs for kube-scheduler. Pure.

A pod of either wants a whole node: all eight GPUs of it.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["GPUS", "LEAF_LABEL", "NAMESPACE", "flyer_job", "peer_gang", "peer_pod"]

NAMESPACE: Final = "bench"
LEAF_LABEL: Final = "fireflyer.dev/leaf"
GPUS: Final = "8"
Object = dict[str, Any]
_CONTAINER: Final[Object] = {
    "name": "trainer",
    "image": "registry.example/trainer:1",
    "command": ["python3", "train.py"],
}
_TOLERATION: Final = {
    "key": "fireflyer.dev/dedicated",
    "operator": "Exists",
    "effect": "NoSchedule",
}


def flyer_job(name: str, nodes: int, **spec: Any) -> Object:
    """A FlyerJob. It may be preempted as soon as it runs."""
    return {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodes": nodes,
            "ranksPerNode": 8,
            "nodeClass": "a100",
            "preemption": {
                "checkpointGracePeriod": "60s",
                "maxCheckpointGracePeriod": "10m",
                "minRuntime": "0s",
            },
            "template": {"spec": {"containers": [_CONTAINER]}},
            **spec,
        },
    }


def peer_gang(name: str, nodes: int, *, one_leaf: bool) -> tuple[Object, list[Object]]:
    """A PodGroup for kube-scheduler's own gang scheduling, and its pods."""
    spec: Object = {"schedulingPolicy": {"gang": {"minCount": nodes}}}
    if one_leaf:
        spec["schedulingConstraints"] = {"topology": [{"key": LEAF_LABEL}]}
    group = {
        "apiVersion": "scheduling.k8s.io/v1alpha2",
        "kind": "PodGroup",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
    pods = [peer_pod(f"{name}-{rank}") for rank in range(nodes)]
    for pod in pods:
        pod["spec"]["schedulingGroup"] = {"podGroupName": name}
    return group, pods


def peer_pod(name: str) -> Object:
    """One pod for a whole node."""
    container = {
        **_CONTAINER,
        "resources": {"limits": {"fireflyer.dev/gpu": GPUS}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"bench": "peer"}},
        "spec": {
            "containers": [container],
            "tolerations": [_TOLERATION],
            "restartPolicy": "Never",
            "nodeSelector": {"fireflyer.dev/node-class": "a100"},
        },
    }

"""Pods for tests, as manifests."""

from __future__ import annotations

from typing import Any

__all__ = ["sleeper", "train_pod"]

TRAIN_IMAGE = "docker.io/fireflyer/train:test"


def train_pod(name: str, node: str, *command: str, **spec: Any) -> dict[str, Any]:
    """A pod with Python on this node, whatever the node's taints."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "main", "image": TRAIN_IMAGE, "command": list(command)}],
            **spec,
        },
    }


def sleeper(name: str, node: str, **spec: Any) -> dict[str, Any]:
    """A pod that does nothing, to run commands in."""
    return train_pod(name, node, "sleep", "infinity", **spec)

"""Pods for tests, as manifests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TRAIN_IMAGE", "mount_torch", "sleeper", "train_pod"]

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


def mount_torch(job: dict[str, Any]) -> None:
    """Gives a FlyerJob's container torch: the user's image would bring it, ours has this machine's.

    HFReduce comes from us. Skips the test where torch is not installed.
    """
    module_spec = importlib.util.find_spec("torch")
    if module_spec is None or module_spec.origin is None:
        pytest.skip("torch is not installed here, so pods cannot have it either")
    site = {"path": str(Path(module_spec.origin).parents[1]), "type": "Directory"}
    spec = job["spec"]["template"]["spec"]
    spec.setdefault("volumes", []).append({"name": "site", "hostPath": site})
    (container,) = spec["containers"]
    mount = {"name": "site", "mountPath": "/site", "readOnly": True}
    container.setdefault("volumeMounts", []).append(mount)
    container.setdefault("env", []).append({"name": "PYTHONPATH", "value": "/site"})

"""Valid sample objects."""

from __future__ import annotations

from typing import Any

from flyer.api import API_VERSION, KIND_JOB

__all__ = ["job_object", "owned_by"]


def job_object(name: str, *, nodes: int = 1, **spec: Any) -> dict[str, Any]:
    """A FlyerJob with one container."""
    template = {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}}
    body = {"nodes": nodes, "template": template, **spec}
    return {
        "apiVersion": API_VERSION, "kind": KIND_JOB, "metadata": {"name": name}, "spec": body,
    }  # fmt: skip


def owned_by(owner: dict[str, Any]) -> dict[str, Any]:
    """Metadata that names the controller of a dependent."""
    metadata = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"],
        "uid": metadata["uid"], "controller": True,
    }  # fmt: skip
    return {"ownerReferences": [reference]}

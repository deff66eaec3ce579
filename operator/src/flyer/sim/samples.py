"""Small jobs and clusters, for simulations and tests."""

from __future__ import annotations

from typing import Any

from flyer.api import API_VERSION, KIND_JOB, USER_ANNOTATION, FlyerJob
from flyer.engine import Node

# Short, which keeps simulations short.
PREEMPTION = {"checkpointGracePeriod": "10s", "maxCheckpointGracePeriod": "60s", "minRuntime": "5s"}


def sample_job(name: str, nodes: int = 1, *, user: str = "", **spec: Any) -> FlyerJob:
    """A job that requires only nodes; `spec` has the fields of a manifest."""
    container = {"name": "trainer", "command": ["true"]}
    return FlyerJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": KIND_JOB,
            "metadata": {"name": name, "annotations": {USER_ANNOTATION: user} if user else {}},
            "spec": {
                "nodes": nodes,
                "preemption": PREEMPTION,
                "template": {"spec": {"containers": [container]}},
                **spec,
            },
        }
    )


def two_zones(per_zone: int = 3, *, slots: int = 8, node_class: str = "default") -> list[Node]:
    """Zones A and B: nodes a0, a1 … and b0, b1 …, two to a leaf."""
    return [
        Node(f"{zone.lower()}{index}", zone, f"{zone}{index // 2}", node_class, slots)
        for zone in "AB"
        for index in range(per_zone)
    ]


__all__ = ["PREEMPTION", "sample_job", "two_zones"]

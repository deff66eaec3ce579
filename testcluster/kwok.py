"""Simulated nodes for scale tests: kwok renews their leases and simulates their pods' lifecycle.

They carry the annotation by which kwok selects its nodes, so real nodes in the same cluster are
unaffected. Half of them are in each zone, 16 behind each leaf switch, 8 GPUs in each.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from programs import binaries
from testcluster.nodes import NodeSpec
from testcluster.processes import Process

if TYPE_CHECKING:
    from testcluster.handle import Cluster

__all__ = ["KWOK", "add", "manifest", "spec"]

KWOK = "kwok"
ANNOTATION = "kwok.x-k8s.io/node"
NODES_PER_LEAF = 16
IN_FLIGHT = 32  # concurrent creations: more only fills the API server's queues

RESOURCES = {
    "cpu": "128",
    "memory": "512Gi",
    "pods": "110",
    "ephemeral-storage": "1Ti",
    "fireflyer.dev/gpu": "8",
    "fireflyer.dev/rdma-hfreduce": "16",
    "fireflyer.dev/rdma-nccl": "16",
    "fireflyer.dev/rdma-storage": "16",
}

_CONDITIONS: Final = """
{{ $now := Now }}
conditions:
{{ range NodeConditions }}
- type: {{ .type | Quote }}
  status: {{ .status | Quote }}
  reason: {{ .reason | Quote }}
  message: {{ .message | Quote }}
  lastHeartbeatTime: {{ $now | Quote }}
  lastTransitionTime: {{ $now | Quote }}
{{ end }}
addresses:
- type: InternalIP
  address: {{ NodeIP | Quote }}
- type: Hostname
  address: {{ .metadata.name | Quote }}
"""
# By default kwok also writes the whole status of every node every 20 seconds, which for 500 nodes
# takes half a core of the API server. A lease is enough.
_STAGE: Final[dict[str, Any]] = {
    "apiVersion": "kwok.x-k8s.io/v1alpha1",
    "kind": "Stage",
    "metadata": {"name": "node-ready"},
    "spec": {
        "resourceRef": {"apiGroup": "v1", "kind": "Node"},
        "selector": {
            "matchExpressions": [
                {
                    "key": '.status.conditions.[] | select( .type == "Ready" ) | .status',
                    "operator": "NotIn",
                    "values": ["True"],
                }
            ]
        },
        "next": {"statusTemplate": _CONDITIONS},
    },
}


def add(cluster: Cluster, count: int, nodes_per_leaf: int = NODES_PER_LEAF) -> list[str]:
    """Starts kwok and adds `count` nodes; they become Ready within seconds. Their names."""
    state = cluster.state
    config = state.folder / "kwok.yaml"
    config.write_text(json.dumps(_STAGE))
    arguments = (
        f"--kubeconfig={state.kubeconfig}",
        f"--config={config}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        "--node-lease-duration-seconds=200",
    )
    Process(state, KWOK, (str(binaries.find(KWOK)), *arguments), {}).start()
    specs = [spec(index, count, nodes_per_leaf) for index in range(count)]
    asyncio.run(_create(cluster, specs))
    return [each.name for each in specs]


def spec(index: int, count: int, nodes_per_leaf: int = NODES_PER_LEAF) -> NodeSpec:
    """The node with this index, of `count`."""
    zone = "A" if index < (count + 1) // 2 else "B"
    leaf = f"leaf-{zone.lower()}{index // nodes_per_leaf}"
    return NodeSpec(f"kwok-{index:04d}", zone, leaf)


def manifest(node: NodeSpec) -> dict[str, Any]:
    """The Node object that kwok takes care of."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.name,
            "labels": node.labels | {"kubernetes.io/hostname": node.name, "type": "kwok"},
            "annotations": {ANNOTATION: "fake"},
        },
        "spec": {"taints": node.taints},
        "status": {"allocatable": RESOURCES, "capacity": RESOURCES},
    }


async def _create(cluster: Cluster, specs: list[NodeSpec]) -> None:
    from kubernetes.aio.client import CoreV1Api

    limit = asyncio.Semaphore(IN_FLIGHT)
    async with await cluster.client() as api:
        core = CoreV1Api(api)

        async def create(node: NodeSpec) -> None:
            async with limit:
                await core.create_node(manifest(node))  # type: ignore[arg-type]

        await asyncio.gather(*(create(node) for node in specs))

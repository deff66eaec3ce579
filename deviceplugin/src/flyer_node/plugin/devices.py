"""Character devices of GPUs and HCAs: (path in the container, path on the host). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer_node.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from flyer_node.plugin.node_view import NodeView

__all__ = ["gpu_common", "gpu_nodes", "rdma_common", "rdma_nodes"]

Nodes = tuple[tuple[str, str], ...]


def gpu_nodes(view: NodeView, uuid: str) -> Nodes:
    """The node of one GPU; RequestError if there is none."""
    minor = view.inventory.gpus_by_uuid[uuid].minor
    name = f"nvidia{minor}"
    if minor is None or not view.exists(f"{view.device_root}/{name}"):
        text = f"fireflyer.dev/gpu: {uuid} has no device node {view.device_root}/{name}"
        raise RequestError("FAILED_PRECONDITION", f"{text}: is the driver loaded?")
    return _paths(view, [name])


def gpu_common(view: NodeView) -> Nodes:
    """Nodes that every container with a GPU needs, as far as the driver made them."""
    names = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
    return _paths(view, [name for name in names if _exists(view, name)])


def rdma_nodes(view: NodeView, hcas: Collection[str]) -> Nodes:
    """The verbs devices of these HCAs; RequestError if one has no node."""
    names = [
        f"infiniband/{hca.verbs_device}"
        for hca in view.inventory.hcas
        if hca.name in hcas and hca.verbs_device
    ]
    for name in names:
        if not _exists(view, name):
            text = f"no device node {view.device_root}/{name}: is ib_uverbs loaded?"
            raise RequestError("FAILED_PRECONDITION", text)
    return _paths(view, names)


def rdma_common(view: NodeView) -> Nodes:
    """The connection manager's node, if there is one."""
    manager = "infiniband/rdma_cm"
    return _paths(view, [manager] if _exists(view, manager) else [])


def _exists(view: NodeView, name: str) -> bool:
    return view.exists(f"{view.device_root}/{name}")


def _paths(view: NodeView, names: Collection[str]) -> Nodes:
    return tuple((f"/dev/{name}", f"{view.device_root}/{name}") for name in names)

"""Container Device Interface: specifications of this node's devices, and NVIDIA's own. Pure.

The container runtime adds the devices of a specification to the containers whose Allocate response
names it. A pod's environment is not involved, so it cannot add devices that were not allocated.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from flyer_node.errors import RequestError
from flyer_node.plugin.devices import gpu_common, gpu_nodes, rdma_common, rdma_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flyer_node.plugin.node_view import NodeView

__all__ = [
    "FILES",
    "TOPOLOGY_IN_CONTAINER",
    "documents",
    "gpu_name",
    "nvidia_devices",
    "nvidia_name",
    "rdma_name",
    "topology_name",
]

VERSION = "0.5.0"
"""The first with `hostPath`; containerd 1.7 and CRI-O 1.26 read it."""

TOPOLOGY_IN_CONTAINER = "/etc/fireflyer/nccl-topology.xml"

_GPU, _RDMA, _TOPOLOGY = "fireflyer.dev/gpu", "fireflyer.dev/rdma", "fireflyer.dev/topology"

FILES = {kind: f"{kind.replace('/', '-')}.json" for kind in (_GPU, _RDMA, _TOPOLOGY)}
"""Kind of device → file name in the runtime's folder, as CDI requires: vendor, dash, class."""

_NVIDIA = "nvidia.com/gpu"
_KIND = re.compile(rf"^\s*\"?kind\"?\s*:\s*[\"']?{re.escape(_NVIDIA)}[\"']?\s*,?\s*$", re.MULTILINE)
_UUID = re.compile(
    r"\"?name\"?\s*:\s*[\"']?(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})[\"']?\s*[,}]?\s*$",
    re.MULTILINE,
)


def gpu_name(uuid: str) -> str:
    """CDI name of a GPU."""
    return f"{_GPU}={uuid}"


def rdma_name(hca: str) -> str:
    """Likewise for the verbs device of an HCA."""
    return f"{_RDMA}={hca}"


def topology_name() -> str:
    """Likewise for NCCL's topology file."""
    return f"{_TOPOLOGY}=nccl"


def nvidia_name(uuid: str) -> str:
    """The name of a GPU, with the driver's libraries, in the specification of NVIDIA's toolkit."""
    return f"{_NVIDIA}={uuid}"


def nvidia_devices(specifications: Iterable[str]) -> frozenset[str]:
    """UUIDs of the GPUs that NVIDIA's specifications (YAML or JSON) name.

    Names by index are ignored: the order of GPUs may differ after a reboot, and a specification
    from before it would give a container another GPU than the allocated one.
    """
    uuids: set[str] = set()
    for text in specifications:
        if _KIND.search(text):
            uuids.update(_UUID.findall(text))
    return frozenset(uuids)


def documents(view: NodeView) -> dict[str, str]:
    """File name → content; a kind without devices has no file, as CDI refuses an empty list.

    Devices that are out of service remain: a container that restarts requests its device again.
    """
    gpus = {}
    for gpu in view.inventory.gpus:
        try:
            gpus[gpu.uuid] = _nodes(gpu_nodes(view, gpu.uuid))
        except RequestError:
            continue  # no device node; Allocate reports it
    hcas = {}
    for hca in view.inventory.hcas:
        if hca.verbs_device:
            try:
                hcas[hca.name] = _nodes(rdma_nodes(view, [hca.name]))
            except RequestError:
                continue
    specs = {
        _GPU: (gpus, gpu_common(view)),
        _RDMA: (hcas, rdma_common(view)),
        _TOPOLOGY: ({"nccl": _mount(view.topology_file)} if view.topology_file else {}, ()),
    }
    return {
        FILES[kind]: _document(kind, devices, _nodes(common))
        for kind, (devices, common) in specs.items()
        if devices
    }


def _document(kind: str, devices: dict[str, dict[str, Any]], common: dict[str, Any]) -> str:
    content: dict[str, Any] = {
        "cdiVersion": VERSION,
        "kind": kind,
        "devices": [{"name": name, "containerEdits": edits} for name, edits in devices.items()],
    }
    if common["deviceNodes"]:
        content["containerEdits"] = common
    return json.dumps(content, indent=2) + "\n"


def _nodes(nodes: Collection[tuple[str, str]]) -> dict[str, Any]:
    return {
        "deviceNodes": [
            {"path": path, "hostPath": host, "permissions": "rw"} for path, host in nodes
        ]
    }


def _mount(host: str) -> dict[str, Any]:
    options = ["ro", "nosuid", "nodev", "noexec", "rbind"]
    path = {"hostPath": host, "containerPath": TOPOLOGY_IN_CONTAINER, "options": options}
    return {"mounts": [path]}

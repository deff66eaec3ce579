"""Device lists and allocations of each resource. Pure.

A snapshot is made whenever inventory or health changes; all responses to the kubelet come from the
newest snapshot, so no request accesses the hardware.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flyer_node.allocate import GpuTopology, choose, gpu_topology
from flyer_node.errors import RequestError
from flyer_node.health.store import port_id
from flyer_node.plugin import cdi_spec, traffic
from flyer_node.plugin.devices import gpu_common, gpu_nodes, rdma_common, rdma_nodes
from flyer_node.plugin.traffic import TrafficClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer_node.inventory import LinkLayer
    from flyer_node.plugin.node_view import NodeView

__all__ = [
    "RESOURCES",
    "Allocation",
    "Device",
    "GpuResource",
    "RdmaResource",
    "Resource",
    "resources_of",
]

GPU = "fireflyer.dev/gpu"
RDMA = {
    "fireflyer.dev/rdma-hfreduce": (TrafficClass.HFREDUCE, "FLYER_HFREDUCE"),
    "fireflyer.dev/rdma-nccl": (TrafficClass.NCCL, "FLYER_NCCL"),
    "fireflyer.dev/rdma-storage": (TrafficClass.STORAGE, "FLYER_STORAGE"),
    "rdma/hca": (TrafficClass.OTHER, "FLYER_HCA"),
}
RESOURCES = (GPU, *RDMA)
"""Every resource; each is registered on every node, with no devices where there are none."""

NO_DEVICES = "void"
"""The value of NVIDIA_VISIBLE_DEVICES by which NVIDIA's runtime adds nothing. It takes the place of
the `all` in the environment of many images; a value in the pod has priority."""


@dataclass(frozen=True, slots=True)
class Device:
    """One line of a resource's list."""

    id: str
    healthy: bool
    numa_node: int | None


@dataclass(frozen=True)
class Allocation:
    """Devices, mounts and variables for a container."""

    environment: dict[str, str] = field(default_factory=dict)
    device_nodes: tuple[tuple[str, str], ...] = ()
    """(path in the container, path on the host)."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Read-only, likewise."""
    cdi_devices: tuple[str, ...] = ()


class Resource(Protocol):
    """One resource of the kubelet."""

    name: str

    def devices(self) -> tuple[Device, ...]:
        """The whole list."""

    def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """The best choice; raises RequestError for a question that has no answer."""

    def allocate(self, ids: Sequence[str]) -> Allocation:
        """Allocation for a container with these devices; raises RequestError."""


def resources_of(view: NodeView) -> dict[str, Resource]:
    """All resources of a node."""
    rdma = {name: RdmaResource(name, view, *row) for name, row in RDMA.items()}
    return {GPU: GpuResource(view), **rdma}


def _check_ids(resource: str, ids: Sequence[str], devices: dict[str, Device]) -> None:
    """Refuses what no container may get: nothing, twice the same, unknown, out of service."""
    if not ids:
        raise RequestError("INVALID_ARGUMENT", f"{resource}: no device ids: request at least one")
    if len(set(ids)) != len(ids):
        raise RequestError("INVALID_ARGUMENT", f"{resource}: a device id is named twice")
    for device_id in ids:
        device = devices.get(device_id)
        if device is None:
            text = f"{resource}: device {device_id[:80]!r} is not on this node"
            raise RequestError("NOT_FOUND", text)
        if not device.healthy:
            text = f"{resource}: device {device_id} is out of service; see "
            text += "`kubectl describe nodehealth`"
            raise RequestError("FAILED_PRECONDITION", text)


def _check_cdi(resource: str, view: NodeView) -> None:
    """Refuses devices that are unknown to the container runtime."""
    if view.cdi_error:
        text = f"{resource}: no CDI specification: {view.cdi_error}"
        raise RequestError("FAILED_PRECONDITION", text)


class GpuResource:
    """Whole GPUs; pairs are kept by the preferred allocation."""

    name = GPU

    def __init__(self, view: NodeView) -> None:
        self._view = view
        self._gpu_topology: GpuTopology = gpu_topology(view.inventory, view.bad_pairs)
        self._devices = {
            gpu.uuid: Device(
                gpu.uuid, gpu.uuid not in view.bad_gpus, view.inventory.numa_of_gpu(gpu.uuid)
            )
            for gpu in sorted(view.inventory.gpus, key=lambda gpu: gpu.index)
        }

    def devices(self) -> tuple[Device, ...]:
        """One a GPU."""
        return tuple(self._devices.values())

    def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """Exact over all subsets."""
        return choose(self._gpu_topology, available, must_include, size)

    def allocate(self, ids: Sequence[str]) -> Allocation:
        """GPUs in NVML's order, with their pairs and NUMA nodes in the job's environment."""
        _check_ids(self.name, ids, self._devices)
        view = self._view
        uuids = [uuid for uuid in self._devices if uuid in set(ids)]
        pairs = [
            f"{bridge.first}+{bridge.second}"
            for bridge in view.inventory.bridges
            if {bridge.first, bridge.second} <= set(uuids) and bridge.id not in view.bad_pairs
        ]
        numa = [self._devices[uuid].numa_node for uuid in uuids]
        environment = {
            "FLYER_GPUS": ",".join(uuids),
            "FLYER_GPU_PAIRS": ",".join(pairs),
            "FLYER_GPU_NUMA": ",".join("" if node is None else str(node) for node in numa),
        }
        environment["NVIDIA_VISIBLE_DEVICES"] = NO_DEVICES
        nodes = [node for uuid in uuids for node in gpu_nodes(view, uuid)]
        if view.device_mode == "cdi":
            _check_cdi(self.name, view)
            names = [cdi_spec.gpu_name(uuid) for uuid in uuids]
            names += [cdi_spec.nvidia_name(uuid) for uuid in uuids if uuid in view.nvidia_cdi]
            return Allocation(environment, cdi_devices=tuple(names))
        return Allocation(environment, device_nodes=(*nodes, *gpu_common(view)))


class RdmaResource:
    """A share of a port for one traffic class."""

    def __init__(self, name: str, view: NodeView, traffic_class: TrafficClass, prefix: str) -> None:
        self.name = name
        self._view = view
        self._class = traffic_class
        self._prefix = prefix
        self._devices: dict[str, Device] = {}
        self._port_of: dict[str, tuple[str, int, LinkLayer]] = {}
        for hca in view.inventory.hcas:
            for port in hca.ports if hca.verbs_device else ():
                own = port_id(hca.name, port.number)
                for slot in range(view.slots):
                    device = Device(f"{own}-{slot:03d}", own not in view.bad_ports, hca.numa_node)
                    self._devices[device.id] = device
                    self._port_of[device.id] = (hca.name, port.number, port.link_layer)

    def devices(self) -> tuple[Device, ...]:
        """`slots` a port."""
        return tuple(self._devices.values())

    def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """As many different ports as possible, those with the most free slots first."""
        unknown = [
            device_id for device_id in (*available, *must_include) if device_id not in self._devices
        ]
        if unknown:
            text = f"{self.name}: device {unknown[0][:80]!r} is not on this node"
            raise RequestError("NOT_FOUND", text)
        selection = list(dict.fromkeys(must_include))
        if not len(selection) <= size <= len(set(available)) or set(selection) - set(available):
            text = f"{self.name}: allocation_size {size} does not fit available and must_include"
            raise RequestError("INVALID_ARGUMENT", text)
        free: dict[tuple[str, int], list[str]] = defaultdict(list)
        for device_id in sorted(set(available) - set(selection), reverse=True):
            free[self._port_of[device_id][:2]].append(device_id)
        uses = dict.fromkeys(free, 0)
        for device_id in selection:
            uses[self._port_of[device_id][:2]] = uses.get(self._port_of[device_id][:2], 0) + 1
        while len(selection) < size:
            port = min(
                (port for port in free if free[port]),
                key=lambda port: (uses[port], -len(free[port]), port),
            )
            uses[port] += 1
            selection.append(free[port].pop())
        return selection

    def allocate(self, ids: Sequence[str]) -> Allocation:
        """The verbs devices of the ports, the class's fields, and for NCCL its topology file."""
        _check_ids(self.name, ids, self._devices)
        view = self._view
        ports = sorted({self._port_of[device_id] for device_id in ids})
        adapters = {name for name, _, _ in ports}
        nodes = (*rdma_nodes(view, adapters), *rdma_common(view))
        environment = traffic.environment(self._class, ports, prefix=self._prefix)
        topology = self._class is TrafficClass.NCCL and bool(view.topology_file)
        if topology:
            environment["NCCL_TOPO_FILE"] = cdi_spec.TOPOLOGY_IN_CONTAINER
        if view.device_mode == "cdi":
            _check_cdi(self.name, view)
            names = [cdi_spec.rdma_name(adapter) for adapter in sorted(adapters)]
            names += [cdi_spec.topology_name()] if topology else []
            return Allocation(environment, cdi_devices=tuple(names))
        mounts = ((cdi_spec.TOPOLOGY_IN_CONTAINER, view.topology_file),) if topology else ()
        return Allocation(environment, device_nodes=nodes, mounts=mounts)

"""CDI specifications: the agent's own, NVIDIA's, and what a pod's environment can change."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from flyer_node.plugin.cdi_folder import CdiFolder, nvidia_cdi_gpus
from flyer_node.plugin.cdi_spec import FILES, documents, nvidia_devices
from flyer_node.plugin.node_view import NodeView
from flyer_node.plugin.resources import GPU, resources_of

from deviceplugin.testing.harness import inventory_of
from deviceplugin.testing.sysfs import paper_node

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Node

NCCL = "fireflyer.dev/rdma-nccl"

NVIDIA_YAML = """---
cdiVersion: 0.5.0
kind: {kind}
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
- name: {uuid}
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  mounts:
  - hostPath: /usr/lib/libcuda.so.550
    containerPath: /usr/lib/libcuda.so.550
"""


@pytest.fixture
def view(tmp_path: Path) -> NodeView:
    inventory = inventory_of(paper_node(), tmp_path / "sys")
    return NodeView(inventory, device_mode="cdi", topology_file="/var/lib/x/nccl.xml")


class Runtime:
    """A container runtime with CDI and, as NVIDIA's, with GPUs by environment if it is allowed."""

    def __init__(self, folder: Path, *, accepts_environment: bool) -> None:
        self._accepts = accepts_environment
        self._specs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def start(self, names: list[str], environment: dict[str, str]) -> tuple[set[str], set[str]]:
        """Device nodes and mounts of a container."""
        edits: list[dict[str, Any]] = []
        for name in names:
            kind, _, device = name.partition("=")
            spec = next(item for item in self._specs if item["kind"] == kind)
            cdi_device = next(item for item in spec["devices"] if item["name"] == device)
            edits += [cdi_device["containerEdits"], spec.get("containerEdits", {})]
        nodes = {node["path"] for edit in edits for node in edit.get("deviceNodes", [])}
        mounts = {mount["containerPath"] for edit in edits for mount in edit.get("mounts", [])}
        if self._accepts and environment.get("NVIDIA_VISIBLE_DEVICES") == "all":
            nodes |= {f"/dev/nvidia{index}" for index in range(8)}
        return nodes, mounts


def gpus(nodes: set[str]) -> set[str]:
    return {path for path in nodes if path.removeprefix("/dev/nvidia").isdecimal()}


@pytest.mark.parametrize("own", [{}, {"NVIDIA_VISIBLE_DEVICES": "all"}, {"FLYER_GPUS": "GPU-x"}])
def test_a_pods_environment_does_not_change_the_allocated_gpus(
    view: NodeView, tmp_path: Path, own: dict[str, str]
) -> None:
    assert CdiFolder(tmp_path / "cdi").write(view) == ""
    gpu = view.inventory.gpus[5]
    allocate = resources_of(view)[GPU].allocate([gpu.uuid])
    image = {"NVIDIA_VISIBLE_DEVICES": "all"}  # as in the images that NVIDIA publishes
    environment = image | allocate.environment | own  # the kubelet's order
    runtime = Runtime(tmp_path / "cdi", accepts_environment=False)
    nodes, _ = runtime.start(list(allocate.cdi_devices), environment)
    assert gpus(nodes) == {"/dev/nvidia5"}
    assert "/dev/nvidiactl" in nodes


def test_an_images_environment_changes_no_allocation(view: NodeView, tmp_path: Path) -> None:
    """Also where NVIDIA's runtime still reads the environment of unprivileged containers."""
    CdiFolder(tmp_path / "cdi").write(view)
    runtime = Runtime(tmp_path / "cdi", accepts_environment=True)
    allocate = resources_of(view)[GPU].allocate([view.inventory.gpus[2].uuid])
    environment = {"NVIDIA_VISIBLE_DEVICES": "all"} | allocate.environment
    nodes, _ = runtime.start(list(allocate.cdi_devices), environment)
    assert gpus(nodes) == {"/dev/nvidia2"}


def test_rdma_and_topology_are_cdi_devices(view: NodeView, tmp_path: Path) -> None:
    CdiFolder(tmp_path / "cdi").write(view)
    allocate = resources_of(view)[NCCL].allocate([resources_of(view)[NCCL].devices()[0].id])
    runtime = Runtime(tmp_path / "cdi", accepts_environment=False)
    nodes, mounts = runtime.start(list(allocate.cdi_devices), allocate.environment)
    assert nodes == {"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"}
    assert mounts == {allocate.environment["NCCL_TOPO_FILE"]}


def test_the_hosts_paths_are_those_of_the_driver_s_root(view: NodeView) -> None:
    moved = replace(view, device_root="/run/nvidia/driver/dev")
    spec = json.loads(documents(moved)[FILES[GPU]])
    node = spec["devices"][0]["containerEdits"]["deviceNodes"][0]
    assert node["path"] == "/dev/nvidia0"
    assert node["hostPath"] == "/run/nvidia/driver/dev/nvidia0"


def test_a_gpu_without_its_device_node_is_in_no_specification(view: NodeView) -> None:
    some = replace(view, exists=lambda path: not path.endswith("nvidia3"))
    names = [device["name"] for device in json.loads(documents(some)[FILES[GPU]])["devices"]]
    assert view.inventory.gpus[3].uuid not in names
    assert len(names) == 7


def test_a_kind_without_devices_has_no_file(view: NodeView, tmp_path: Path) -> None:
    """A specification with an empty list is invalid, and makes the runtime refuse all its names."""
    folder = CdiFolder(tmp_path / "cdi")
    folder.write(view)
    (tmp_path / "cdi" / "other.json").write_text("{}")
    folder.write(replace(view, exists=lambda _: False, topology_file=""))
    assert [path.name for path in (tmp_path / "cdi").iterdir()] == ["other.json"]


def test_the_error_names_a_read_only_folder(view: NodeView, tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("a file")
    assert "cannot be written" in CdiFolder(tmp_path / "cdi").write(view)


def test_nvidias_specification_adds_the_libraries_of_its_gpus(
    view: NodeView, tmp_path: Path
) -> None:
    uuid = view.inventory.gpus[0].uuid
    (tmp_path / "nvidia.yaml").write_text(NVIDIA_YAML.format(kind="nvidia.com/gpu", uuid=uuid))
    (tmp_path / "broken.yaml").write_bytes(b"\xff\xfe")
    uuids = nvidia_cdi_gpus([tmp_path / "none", tmp_path])
    assert uuids == {uuid}
    with_libraries = replace(view, nvidia_cdi=uuids)
    allocate = resources_of(with_libraries)[GPU].allocate(
        [gpu.uuid for gpu in view.inventory.gpus[:2]]
    )
    assert f"nvidia.com/gpu={uuid}" in allocate.cdi_devices
    assert len(allocate.cdi_devices) == 3, "the second GPU is in no specification of NVIDIA's"


def test_an_index_or_another_kind_does_not_name_a_gpu(view: NodeView) -> None:
    """An index may be another GPU after a reboot."""
    uuid = view.inventory.gpus[0].uuid
    other = NVIDIA_YAML.format(kind="example.com/gpu", uuid=uuid)
    by_index = NVIDIA_YAML.format(kind="nvidia.com/gpu", uuid='"1"')
    assert nvidia_devices([other, by_index]) == frozenset()
    as_json = json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": uuid}]}, indent=1)
    assert nvidia_devices([as_json]) == {uuid}


async def test_the_agent_writes_specifications_before_it_offers_devices(node: Node) -> None:
    await node.gpus(8)
    response = await node.kubelet.admit(GPU, "a", 2)
    runtime = Runtime(node.folder / "cdi", accepts_environment=False)
    nodes, _ = runtime.start([device.name for device in response.cdi_devices], dict(response.envs))
    assert len(gpus(nodes)) == 2
    assert not response.devices

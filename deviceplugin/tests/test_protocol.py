"""The servers and the registration dance, against a kubelet's device manager."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from flyer_node.inventory import Inventory
from flyer_node.metrics import Metrics
from flyer_node.plugin.device_lists import DeviceLists
from flyer_node.plugin.node_view import NodeView
from flyer_node.plugin.registrar import Registrar
from flyer_node.plugin.resources import GPU, RESOURCES
from flyer_node.proto import deviceplugin_pb2 as pb

from deviceplugin.testing.harness import PluginHarness, inventory_of, plugin_harness
from deviceplugin.testing.kubelet import call
from deviceplugin.testing.sysfs import paper_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def harness() -> AsyncIterator[PluginHarness]:
    async with plugin_harness() as started:
        yield started


async def test_every_resource_is_offered_with_numa_hints(harness: PluginHarness) -> None:
    await harness.ready()
    gpus = harness.kubelet.plugins[GPU].devices
    assert [gpu.topology.nodes[0].ID for gpu in gpus.values()] == [0, 0, 0, 0, 1, 1, 1, 1]
    for name in RESOURCES[1:]:
        devices = harness.kubelet.plugins[name].devices
        assert len(devices) == 64
        assert {device.topology.nodes[0].ID for device in devices.values()} == {1}
        assert all(len(device) <= 63 for device in devices)


async def test_unknown_numa_nodes_give_no_hint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inventory = inventory_of(paper_node(), Path(folder) / "sys")
    without_numa = replace(
        inventory, pci=tuple(replace(device, numa_node=None) for device in inventory.pci)
    )
    async with plugin_harness(NodeView(without_numa)) as harness:
        await harness.ready()
        devices = harness.kubelet.plugins[GPU].devices.values()
        assert all(not device.HasField("topology") for device in devices)


async def test_a_node_without_devices_reports_no_capacity() -> None:
    async with plugin_harness(NodeView(Inventory("empty"))) as harness:
        await harness.ready()
        assert all(not plugin.devices for plugin in harness.kubelet.plugins.values())


async def test_a_container_gets_whole_pairs_nodes_and_environment(harness: PluginHarness) -> None:
    await harness.ready()
    response = await harness.kubelet.admit(GPU, "a", 4)
    pairs = [set(pair.split("+")) for pair in response.envs["FLYER_GPU_PAIRS"].split(",")]
    assert len(pairs) == 2
    assert set().union(*pairs) == set(response.envs["FLYER_GPUS"].split(","))
    nodes = [
        (device.container_path, device.host_path, device.permissions) for device in response.devices
    ]
    assert ("/dev/nvidiactl", "/dev/nvidiactl", "rw") in nodes
    assert sum(path.removeprefix("/dev/nvidia").isdecimal() for path, _, _ in nodes) == 4
    assert not response.cdi_devices


async def test_an_allocation_of_gpus_names_no_gpu_in_the_environment(tmp_path: Path) -> None:
    """NVIDIA's runtime adds the GPUs of NVIDIA_VISIBLE_DEVICES: a allocate must name none there."""
    inventory = inventory_of(paper_node(), tmp_path / "sys")
    for mode in ("nodes", "cdi"):
        async with plugin_harness(NodeView(inventory, device_mode=mode)) as harness:
            await harness.ready()
            response = await harness.kubelet.admit(GPU, "a", 2)
            assert response.envs["NVIDIA_VISIBLE_DEVICES"] == "void", mode


async def test_cdi_names_or_device_nodes_but_never_both(tmp_path: Path) -> None:
    inventory = inventory_of(paper_node(), tmp_path / "sys")
    view = NodeView(inventory, device_mode="cdi", topology_file="/var/lib/x/nccl.xml")
    async with plugin_harness(view) as harness:
        await harness.ready()
        for resource in RESOURCES:
            response = await harness.kubelet.admit(resource, f"a-{resource[-3:]}", 2)
            assert not response.devices, resource
            assert not response.mounts, resource
            assert response.cdi_devices, resource
        response = await harness.kubelet.admit(GPU, "b", 2)
        names = [device.name for device in response.cdi_devices]
        assert names == [
            f"fireflyer.dev/gpu={uuid}" for uuid in response.envs["FLYER_GPUS"].split(",")
        ]


async def test_the_error_of_an_allocation_without_cdi_specifications_has_the_cause(
    tmp_path: Path,
) -> None:
    """A name that the runtime does not track gives an error of containerd that names no remedy."""
    inventory = inventory_of(paper_node(), tmp_path / "sys")
    view = NodeView(inventory, device_mode="cdi", cdi_error="/var/run/cdi cannot be written")
    async with plugin_harness(view) as harness:
        await harness.ready()
        for resource in RESOURCES:
            with pytest.raises(grpc.aio.AioRpcError, match="/var/run/cdi cannot be written"):
                await harness.kubelet.admit(resource, "a", 1)


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
async def test_traffic_classes_have_distinct_fields_and_keys(layer: str, tmp_path: Path) -> None:
    inventory = inventory_of(paper_node().with_layer(layer), tmp_path / "sys")
    async with plugin_harness(NodeView(inventory, topology_file="/var/lib/x/nccl.xml")) as harness:
        await harness.ready()
        grants = {name: await harness.kubelet.admit(name, "a", 1) for name in RESOURCES}
    keys = [key for allocate in grants.values() for key in allocate.envs]
    assert len(keys) == len(set(keys)), "one container may ask for all of them at once"
    nccl = grants["fireflyer.dev/rdma-nccl"]
    assert nccl.envs["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert nccl.envs["NCCL_TOPO_FILE"] == nccl.mounts[0].container_path
    assert nccl.mounts[0].read_only
    hfreduce = grants["fireflyer.dev/rdma-hfreduce"]
    if layer == "InfiniBand":
        assert nccl.envs["NCCL_IB_SL"] == nccl.envs["UCX_IB_SL"] == "1"
        assert "NCCL_IB_TC" not in nccl.envs
        assert hfreduce.envs["FLYER_HFREDUCE_SERVICE_LEVEL"] == "2"
    else:
        assert nccl.envs["NCCL_IB_TC"] == nccl.envs["UCX_IB_TRAFFIC_CLASS"] == "104"
        assert "NCCL_IB_SL" not in nccl.envs
        assert hfreduce.envs["FLYER_HFREDUCE_ROCE_TRAFFIC_CLASS"] == "136"
    assert hfreduce.envs["FLYER_HFREDUCE_DSCP"] == "34"
    assert grants["fireflyer.dev/rdma-storage"].envs["FLYER_STORAGE_DSCP"] == "18"
    paths = {device.container_path for device in hfreduce.devices}
    assert paths == {"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"}


async def test_a_gpu_becomes_unhealthy_and_healthy_without_a_new_registration(
    harness: PluginHarness,
) -> None:
    await harness.ready()
    before = len(harness.kubelet.registrations)
    bad = sorted(harness.kubelet.healthy(GPU))[3]
    harness.device_lists.publish(replace(harness.view, bad_gpus=frozenset({bad})))
    await harness.kubelet.until(lambda: bad not in harness.kubelet.healthy(GPU))
    assert len(harness.kubelet.plugins[GPU].devices) == 8, "the list is always whole"
    harness.device_lists.publish(harness.view)
    await harness.kubelet.until(lambda: len(harness.kubelet.healthy(GPU)) == 8)
    assert len(harness.kubelet.registrations) == before


async def test_kubelet_restarts_are_survived_with_the_same_ids(harness: PluginHarness) -> None:
    await harness.ready()
    ids = {name: set(plugin.devices) for name, plugin in harness.kubelet.plugins.items()}
    slowest = 0.0
    for _ in range(25):
        await harness.kubelet.restart()
        slowest = max(slowest, await harness.ready())
        assert {
            name: set(plugin.devices) for name, plugin in harness.kubelet.plugins.items()
        } == ids
    assert harness.count("flyer_node_kubelet_restarts_total") == 25
    assert slowest < 30, "seconds; the figure on an idle machine is in the benchmarks' table"


async def test_a_registration_that_the_kubelet_refuses_is_retried(harness: PluginHarness) -> None:
    await harness.ready()
    await harness.kubelet.stop()
    harness.kubelet.refuse_next = 12
    await harness.kubelet.start()
    await harness.ready()
    assert harness.count("flyer_node_registrations_total", resource=GPU, outcome="failed") >= 1


async def test_a_deleted_socket_is_recreated(harness: PluginHarness) -> None:
    await harness.ready()
    plugin = harness.kubelet.plugins[GPU]
    (harness.kubelet.folder / plugin.endpoint).unlink()
    await harness.kubelet.until(lambda: harness.kubelet.plugins[GPU] is not plugin)
    await harness.ready()
    await harness.kubelet.admit(GPU, "a", 2)


async def test_a_wiped_folder_with_the_old_kubelet_is_served_again(harness: PluginHarness) -> None:
    await harness.ready()
    old = dict(harness.kubelet.plugins)
    for plugin in old.values():
        (harness.kubelet.folder / plugin.endpoint).unlink()
    await harness.kubelet.until(
        lambda: all(harness.kubelet.plugins[name] is not plugin for name, plugin in old.items())
    )
    await harness.ready()


async def test_a_kubelet_that_stopped_listening_is_registered_again(harness: PluginHarness) -> None:
    await harness.ready()
    await harness.kubelet.cut_stream(GPU)
    assert not harness.kubelet.healthy(GPU)
    await harness.kubelet.until(lambda: len(harness.kubelet.healthy(GPU)) == 8)


async def test_registration_waits_for_a_kubelet_that_is_not_running_yet() -> None:
    async with plugin_harness() as harness:
        await harness.ready()
        await harness.kubelet.stop()
        harness.kubelet.socket.unlink()
        await harness.kubelet.until(lambda: not harness.registrar.registered)
        await harness.kubelet.start()
        await harness.ready()


def preferred(available: list[str], must: list[str], size: int) -> pb.PreferredAllocationRequest:
    request = pb.PreferredAllocationRequest()
    request.container_requests.add(
        available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
    )
    return request


def allocate(*containers: list[str]) -> pb.AllocateRequest:
    request = pb.AllocateRequest()
    for ids in containers:
        request.container_requests.add(devices_ids=ids)
    return request


UUID = paper_node().gpus[0].uuid
HOSTILE = {
    "no container": ("Allocate", allocate(), "INVALID_ARGUMENT"),
    "no ids": ("Allocate", allocate([]), "INVALID_ARGUMENT"),
    "an empty id": ("Allocate", allocate([""]), "NOT_FOUND"),
    "an unknown id": ("Allocate", allocate(["GPU-none"]), "NOT_FOUND"),
    "a path": ("Allocate", allocate(["../../../etc/passwd"]), "NOT_FOUND"),
    "the same id twice": ("Allocate", allocate([UUID, UUID]), "INVALID_ARGUMENT"),
    "one good container and one bad": ("Allocate", allocate([UUID], ["x"]), "NOT_FOUND"),
    "too many containers": ("Allocate", allocate(*[[UUID]] * 65), "INVALID_ARGUMENT"),
    "too many ids": ("Allocate", allocate(["x"] * 8193), "RESOURCE_EXHAUSTED"),
    "an enormous id": ("Allocate", allocate(["x" * (2 << 20)]), "RESOURCE_EXHAUSTED"),
    "not a message": ("Allocate", b"\xff" * 100, "INVALID_ARGUMENT"),
    "a message of another kind": ("Allocate", b"\x0a\x02\x0a\x00", "NOT_FOUND"),
    "a cut message": ("Allocate", allocate([UUID]).SerializeToString()[:-3], "INVALID_ARGUMENT"),
    "a negative size": ("GetPreferredAllocation", preferred([UUID], [], -5), "INVALID_ARGUMENT"),
    "a huge size": ("GetPreferredAllocation", preferred([UUID], [], 2**31 - 1), "INVALID_ARGUMENT"),
    "must without available": (
        "GetPreferredAllocation",
        preferred([], [UUID], 1),
        "INVALID_ARGUMENT",
    ),
    "unknown available": ("GetPreferredAllocation", preferred(["x"], [], 1), "NOT_FOUND"),
    "no question": (
        "GetPreferredAllocation",
        pb.PreferredAllocationRequest(),
        "INVALID_ARGUMENT",
    ),
    "noise to list": ("PreStartContainer", b"\x0a\xff", "INVALID_ARGUMENT"),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_hostile_requests_get_their_code_and_are_counted(
    harness: PluginHarness, case: str
) -> None:
    await harness.ready()
    method, request, code = HOSTILE[case]
    channel = harness.kubelet.plugins[GPU].channel
    with pytest.raises(grpc.aio.AioRpcError) as excinfo:
        await call(channel, method, request)
    assert excinfo.value.code().name == code
    details = {"resource": GPU, "method": method, "code": code}
    assert harness.count("flyer_node_requests_total", **details) == 1
    assert len(harness.kubelet.healthy(GPU)) == 8
    await harness.kubelet.admit(GPU, "after", 2)


async def test_a_message_above_the_limit_of_grpc_is_refused(harness: PluginHarness) -> None:
    await harness.ready()
    with pytest.raises(grpc.aio.AioRpcError) as excinfo:
        await call(harness.kubelet.plugins[GPU].channel, "Allocate", b"\x0a" * (9 << 20))
    assert excinfo.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await harness.kubelet.admit(GPU, "after", 2)


async def test_an_unhealthy_gpu_is_not_allocated(harness: PluginHarness) -> None:
    await harness.ready()
    channel = harness.kubelet.plugins[GPU].channel
    harness.device_lists.publish(replace(harness.view, bad_gpus=frozenset({UUID})))
    with pytest.raises(grpc.aio.AioRpcError) as excinfo:
        await call(channel, "Allocate", allocate([UUID]))
    assert excinfo.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "out of service" in (excinfo.value.details() or "")


async def test_a_missing_device_node_is_reported_before_the_runtime_fails(tmp_path: Path) -> None:
    view = NodeView(inventory_of(paper_node(), tmp_path / "sys"), exists=lambda _: False)
    async with plugin_harness(view) as harness:
        await harness.ready()
        with pytest.raises(grpc.aio.AioRpcError, match="driver loaded"):
            await call(harness.kubelet.plugins[GPU].channel, "Allocate", allocate([UUID]))


async def test_repeated_and_concurrent_calls_all_get_the_same_answer(
    harness: PluginHarness,
) -> None:
    await harness.ready()
    channel = harness.kubelet.plugins[GPU].channel
    free = sorted(harness.kubelet.healthy(GPU))
    questions = [call(channel, "GetPreferredAllocation", preferred(free, [], 4)) for _ in range(48)]
    answers = await asyncio.gather(*questions)
    assert len({tuple(answer.container_responses[0].deviceIDs) for answer in answers}) == 1
    ids = list(answers[0].container_responses[0].deviceIDs)
    responses = await asyncio.gather(*(call(channel, "Allocate", allocate(ids)) for _ in range(48)))
    assert len({answer.SerializeToString(deterministic=True) for answer in responses}) == 1


async def test_excess_streams_are_refused_and_the_stream_of_the_kubelet_continues(
    harness: PluginHarness,
) -> None:
    await harness.ready()
    endpoint = harness.kubelet.folder / harness.kubelet.plugins[GPU].endpoint
    async with grpc.aio.insecure_channel(f"unix:{endpoint}") as channel:
        method = channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        streams = [method(pb.Empty()) for _ in range(7)]
        for stream in streams:
            assert len((await stream.read()).devices) == 8
        with pytest.raises(grpc.aio.AioRpcError) as excinfo:
            await method(pb.Empty()).read()
        assert excinfo.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            stream.cancel()
    harness.device_lists.publish(replace(harness.view, bad_gpus=frozenset({UUID})))
    await harness.kubelet.until(lambda: len(harness.kubelet.healthy(GPU)) == 7)


async def test_an_unknown_method_is_unimplemented(harness: PluginHarness) -> None:
    await harness.ready()
    channel = harness.kubelet.plugins[GPU].channel
    with pytest.raises(grpc.aio.AioRpcError) as excinfo:
        await channel.unary_unary("/v1beta1.DevicePlugin/Deallocate")(b"", timeout=30)
    assert excinfo.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_folder_with_a_path_that_is_too_long_is_reported() -> None:
    from flyer_node.errors import SettingError

    with tempfile.TemporaryDirectory() as short:
        deep = Path(short) / ("d" * 100)
        deep.mkdir()
        device_lists = DeviceLists(NodeView(Inventory("n")))
        registrar = Registrar(deep, RESOURCES, device_lists, Metrics(RESOURCES))
        with pytest.raises(SettingError, match="--plugin-folder"):
            await registrar.run()

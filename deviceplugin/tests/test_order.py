"""Calls in another order than the kubelet's, and about devices that were there a moment ago."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from flyer_node.metrics import Metrics
from flyer_node.plugin.device_lists import DeviceLists
from flyer_node.plugin.node_view import NodeView
from flyer_node.plugin.resources import GPU, RESOURCES
from flyer_node.plugin.server import METHODS, ResourceServer
from flyer_node.proto import deviceplugin_pb2 as pb

from deviceplugin.testing.harness import PluginHarness, inventory_of, plugin_harness
from deviceplugin.testing.kubelet import call
from deviceplugin.testing.sysfs import paper_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

UUIDS = [gpu.uuid for gpu in paper_node().gpus]
NCCL = "fireflyer.dev/rdma-nccl"


@pytest.fixture
async def harness() -> AsyncIterator[PluginHarness]:
    async with plugin_harness() as started:
        yield started


def preferred(available: list[str], size: int) -> pb.PreferredAllocationRequest:
    request = pb.PreferredAllocationRequest()
    request.container_requests.add(available_deviceIDs=available, allocation_size=size)
    return request


def allocate(ids: list[str]) -> pb.AllocateRequest:
    request = pb.AllocateRequest()
    request.container_requests.add(devices_ids=ids)
    return request


async def first_list(channel: grpc.aio.Channel) -> pb.ListAndWatchResponse:
    stream = channel.unary_stream(
        "/v1beta1.DevicePlugin/ListAndWatch",
        request_serializer=pb.Empty.SerializeToString,
        response_deserializer=pb.ListAndWatchResponse.FromString,
    )(pb.Empty())
    message: pb.ListAndWatchResponse = await stream.read()
    stream.cancel()
    return message


async def refused(
    harness: PluginHarness, resource: str, method: str, request: Any
) -> tuple[str, str]:
    """The code and the words; it is counted once."""
    with pytest.raises(grpc.aio.AioRpcError) as excinfo:
        await call(harness.kubelet.plugins[resource].channel, method, request)
    code = excinfo.value.code().name
    details = {"resource": resource, "method": method, "code": code}
    assert harness.count("flyer_node_requests_total", **details) == 1
    return code, excinfo.value.details() or ""


async def test_any_order_of_the_first_calls_gets_the_same_answers() -> None:
    """Before a list was ever asked for, after it, and between: nothing depends on it."""
    requests = {
        "GetDevicePluginOptions": pb.Empty(),
        "GetPreferredAllocation": preferred(UUIDS, 4),
        "Allocate": allocate(UUIDS[:2]),
        "PreStartContainer": pb.PreStartContainerRequest(devices_ids=UUIDS[:2]),
    }
    answers: dict[str, set[bytes]] = {method: set() for method in METHODS}
    # Sockets' paths are at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="fn") as short:
        device_lists = DeviceLists(NodeView(inventory_of(paper_node(), Path(short) / "sys")))
        for order in itertools.permutations(METHODS):
            server = ResourceServer(GPU, Path(short), device_lists, Metrics(RESOURCES))
            await server.start()
            # Without a separate pool, the channel to the previous server would be reused.
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"unix:{server.socket}", options) as channel:
                for method in order:
                    if method == "ListAndWatch":
                        answer: Any = await first_list(channel)
                    else:
                        answer = await call(channel, method, requests[method])
                    answers[method].add(answer.SerializeToString(deterministic=True))
            await server.stop()
    assert {method: len(responses) for method, responses in answers.items()} == dict.fromkeys(
        METHODS, 1
    )


def without(view: NodeView, uuids: set[str]) -> NodeView:
    """As after these GPUs fell off the bus."""
    inventory = view.inventory
    gpus = tuple(item for item in inventory.gpus if item.uuid not in uuids)
    bridges = tuple(
        bridge for bridge in inventory.bridges if not {bridge.first, bridge.second} & uuids
    )
    return replace(view, inventory=replace(inventory, gpus=gpus, bridges=bridges))


async def test_ids_of_a_previous_list_are_unknown_until_they_are_listed_again(
    harness: PluginHarness,
) -> None:
    await harness.ready()
    dropped = UUIDS[-2:]
    harness.device_lists.publish(without(harness.view, set(dropped)))
    # Refused immediately, even before the kubelet has the new list.
    for method, request in (
        ("GetPreferredAllocation", preferred(UUIDS, 4)),
        ("Allocate", allocate([UUIDS[0], dropped[0]])),
    ):
        code, words = await refused(harness, GPU, method, request)
        assert code == "NOT_FOUND"
        assert dropped[0] in words or dropped[1] in words
    await harness.kubelet.until(lambda: harness.kubelet.healthy(GPU) == set(UUIDS[:-2]))
    await harness.kubelet.admit(GPU, "six", 6)
    harness.kubelet.release("six")
    harness.device_lists.publish(harness.view)
    await harness.kubelet.until(lambda: harness.kubelet.healthy(GPU) == set(UUIDS))
    channel = harness.kubelet.plugins[GPU].channel
    await call(channel, "Allocate", allocate(dropped))
    answer = await call(channel, "GetPreferredAllocation", preferred(UUIDS, 4))
    assert set(answer.container_responses[0].deviceIDs) <= set(UUIDS)


async def test_slots_of_a_list_that_shrank_are_unknown(harness: PluginHarness) -> None:
    await harness.ready()
    before = sorted(harness.kubelet.healthy(NCCL))
    harness.device_lists.publish(replace(harness.view, slots=len(before) // 2))
    await harness.kubelet.until(lambda: len(harness.kubelet.healthy(NCCL)) == len(before) // 2)
    last = max(set(before) - harness.kubelet.healthy(NCCL))
    for method, request in (
        ("GetPreferredAllocation", preferred(before, 1)),
        ("Allocate", allocate([last])),
    ):
        assert (await refused(harness, NCCL, method, request))[0] == "NOT_FOUND"
    await harness.kubelet.admit(NCCL, "after", 1)


async def test_calls_during_a_change_of_the_list_see_one_complete_list(
    harness: PluginHarness,
) -> None:
    """Each response is based on one device list, never on parts of two; no internal errors."""
    await harness.ready()
    channel = harness.kubelet.plugins[GPU].channel
    fewer = without(harness.view, set(UUIDS[-2:]))
    codes: set[str] = set()

    async def ask() -> None:
        try:
            answer = await call(channel, "Allocate", allocate(UUIDS))
        except grpc.aio.AioRpcError as error:
            codes.add(error.code().name)
        else:
            codes.add("OK")
            environment = answer.container_responses[0].envs
            assert environment["FLYER_GPUS"] == ",".join(UUIDS)
            assert environment["FLYER_GPU_PAIRS"].count("+") == len(harness.view.inventory.bridges)

    for turn in range(40):
        asking = [asyncio.create_task(ask()) for _ in range(4)]
        for _ in range(turn // 2):  # later within the calls with each turn
            await asyncio.sleep(0)
        harness.device_lists.publish(fewer if turn % 2 == 0 else harness.view)
        await asyncio.gather(*asking)
    assert codes == {"OK", "NOT_FOUND"}
    await harness.kubelet.until(lambda: len(harness.kubelet.healthy(GPU)) == len(UUIDS))

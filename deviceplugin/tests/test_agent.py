"""The whole agent with a fake driver, sysfs and kubelet: injected faults, and the devices that it
offers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from flyer_node.errors import SettingError
from flyer_node.hardware.driver import EventKind
from flyer_node.health.state_machine import State
from flyer_node.health.store import Subject
from flyer_node.inventory import FindingKind
from flyer_node.plugin.resources import GPU

from deviceplugin.testing.sysfs import set_port

if TYPE_CHECKING:
    from conftest import Node

HFREDUCE = "fireflyer.dev/rdma-hfreduce"


def state(node: Node, kind: str, name: str) -> State:
    assert node.agent is not None
    return node.agent.health_store.health[Subject(kind, name)].state  # type: ignore[arg-type]


async def lose_gpu(node: Node, gpu: int) -> None:
    """A reset that follows an Xid before the agent has looked would leave no trace."""
    assert node.agent is not None
    records, record = node.agent.health_store.health, Subject("gpu", node.uuid(gpu))
    await node.until(lambda: records[record].unresponsive, f"GPU {gpu} seen as gone")


async def test_a_gpu_that_falls_off_the_bus_is_withdrawn_until_its_reset(node: Node) -> None:
    await node.gpus(8)
    node.driver.fall_off_the_bus(3)
    await node.gpus(7)
    assert node.uuid(3) not in node.kubelet.healthy(GPU)
    assert len(node.kubelet.plugins[GPU].devices) == 8, "the id stays on the list"
    xid = {"gpu": node.uuid(3), "xid": "79", "class": "uncorrectable"}
    await node.until(lambda: node.value("flyer_node_gpu_xid_total", **xid) == 1)
    await lose_gpu(node, 3)
    registrations = len(node.kubelet.registrations)
    node.driver.reset(3)
    await node.gpus(8)
    assert len(node.kubelet.registrations) == registrations, "without a restart"
    assert state(node, "gpu", node.uuid(3)) is State.HEALTHY


async def test_a_gpu_that_returns_with_half_its_lanes_stays_unhealthy(node: Node) -> None:
    """A probe in the worker, through the real bindings, decides about the return."""
    await node.gpus(8)
    node.driver.fall_off_the_bus(3)
    await node.gpus(7)
    await lose_gpu(node, 3)
    node.driver.reset(3)
    node.driver.width[3] = 8
    node.driver.write()
    assert node.agent is not None
    records, record = node.agent.health_store.health, Subject("gpu", node.uuid(3))
    await node.until(lambda: records[record].reason == "ProbeFailed", "a probe that fails")
    assert "8 of 16 lanes" in records[record].message
    assert len(node.kubelet.healthy(GPU)) == 7
    node.driver.reset(3)
    await node.gpus(8)
    assert node.value("flyer_node_gpu_probes_total") >= 4


async def test_a_gpu_stays_unhealthy_until_its_reset_is_observed(node: Node) -> None:
    """An Xid 79 of a driver without the recovery action's field, and a GPU that still answers."""
    node.driver.recovery[2] = -1
    node.driver.xid(2, 79)
    await node.gpus(7)
    looks = node.value("flyer_node_last_observation_timestamp_seconds", source="driver")
    await node.until(
        lambda: (
            node.value("flyer_node_last_observation_timestamp_seconds", source="driver") > looks + 2
        )
    )
    assert state(node, "gpu", node.uuid(2)) is State.UNHEALTHY
    node.driver.lost.add(2)
    node.driver.write()
    await lose_gpu(node, 2)
    node.driver.reset(2)
    await node.gpus(8)


async def test_a_gpu_that_the_driver_reports_as_unavailable_is_withdrawn(node: Node) -> None:
    """Because of the event only: the GPU still answers, and the driver requests no action."""
    await node.gpus(8)
    node.driver.event(3, EventKind.UNAVAILABLE)
    await node.gpus(7)
    record = Subject("gpu", node.uuid(3))
    assert node.agent is not None
    assert node.agent.health_store.health[record].reason == "GpuUnavailable"


async def test_no_gpu_recovers_while_the_driver_requests_a_recovery_action(node: Node) -> None:
    node.driver.recovery[1] = 1
    node.driver.write()
    await node.gpus(7)
    looks = node.value("flyer_node_last_observation_timestamp_seconds", source="driver")
    await node.until(
        lambda: (
            node.value("flyer_node_last_observation_timestamp_seconds", source="driver") > looks + 2
        )
    )
    assert len(node.kubelet.healthy(GPU)) == 7
    node.driver.reset(1)
    await node.gpus(8)


async def test_xids_caused_by_applications_withdraw_no_device(node: Node) -> None:
    for _ in range(5):
        node.driver.xid(4, 31)
    label = {"gpu": node.uuid(4), "xid": "31", "class": "software"}
    await node.until(lambda: node.value("flyer_node_gpu_xid_total", **label) == 5)
    assert len(node.kubelet.healthy(GPU)) == 8
    assert state(node, "gpu", node.uuid(4)) is State.HEALTHY, "one burst, perhaps one process"


async def test_the_gpus_of_a_failed_bridge_remain_available_as_single_gpus(node: Node) -> None:
    node.driver.links[6] = 8
    node.driver.write()
    pair = f"pair-{node.uuid(6)}"
    await node.until(lambda: state(node, "pair", pair) is State.UNHEALTHY)
    assert len(node.kubelet.healthy(GPU)) == 8
    first = await node.kubelet.admit(GPU, "one", 1)
    assert first.envs["FLYER_GPUS"] in (node.uuid(6), node.uuid(7))
    node.driver.links.clear()
    node.driver.write()
    await node.until(lambda: state(node, "pair", pair) is State.HEALTHY)


async def test_an_xid_74_withdraws_the_pair_only(node: Node) -> None:
    node.driver.xid(0, 74)
    pair = f"pair-{node.uuid(0)}"
    await node.until(lambda: state(node, "pair", pair) is State.UNHEALTHY)
    assert len(node.kubelet.healthy(GPU)) == 8
    await node.until(lambda: state(node, "pair", pair) is State.HEALTHY)


async def test_a_port_is_withdrawn_while_it_is_down(node: Node) -> None:
    set_port(node.sysfs, "mlx5_0", up=False)
    await node.until(lambda: not node.kubelet.healthy(HFREDUCE))
    assert len(node.kubelet.healthy(GPU)) == 8
    set_port(node.sysfs, "mlx5_0", up=True, downed=1)
    await node.until(lambda: len(node.kubelet.healthy(HFREDUCE)) == 64)


async def test_a_link_flash_cut_between_two_polls_is_counted_and_three_are_flapping(
    node: Node,
) -> None:
    set_port(node.sysfs, "mlx5_0", downed=1)
    port = "mlx5_0-1"
    await node.until(lambda: state(node, "hca", port) is State.SUSPECT)
    assert len(node.kubelet.healthy(HFREDUCE)) == 64, "one cut takes nothing out"
    set_port(node.sysfs, "mlx5_0", downed=3)
    await node.until(lambda: not node.kubelet.healthy(HFREDUCE))
    label = {"hca": "mlx5_0", "port": "1", "counter": "link_downed"}
    assert node.value("flyer_node_port_errors_total", **label) == 3
    await node.until(lambda: len(node.kubelet.healthy(HFREDUCE)) == 64)


async def test_a_hung_driver_makes_gpus_unknown_and_delays_no_other_check(machine: Node) -> None:
    await machine.kubelet.start()
    await machine.start(name="hangs")
    try:
        await machine.ready()
        machine.driver.hang = "nvml"
        machine.driver.write()
        await machine.gpus(0)
        assert state(machine, "gpu", machine.uuid(0)) is State.UNKNOWN
        assert machine.value("flyer_node_hardware_worker_kills_total") >= 1
        # The ports are still monitored, and health is served.
        set_port(machine.sysfs, "mlx5_0", up=False)
        await machine.until(lambda: not machine.kubelet.healthy(HFREDUCE))
        assert machine.agent is not None
        url = f"http://127.0.0.1:{machine.agent.http_server.port}"
        for path, part in (
            ("/healthz", "event loop iteration"),
            ("/metrics", "flyer_node_device_state"),
        ):
            body = await asyncio.to_thread(lambda p=path: _get(url + p))
            assert part in body
        machine.driver.hang = ""
        machine.driver.write()
        await machine.gpus(8)
    finally:
        await machine.stop()
        await machine.kubelet.stop()


async def test_silent_connections_block_neither_probes_nor_scrapes(node: Node) -> None:
    """160 connections from many addresses that send no data."""
    assert node.agent is not None
    port = node.agent.http_server.port

    def flooded() -> str:
        with contextlib.ExitStack() as stack:
            for number in range(160):
                source = (f"127.0.1.{number // 3 + 1}", 0)
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 20, source))
            return _get(f"http://127.0.0.1:{port}/metrics")

    assert "flyer_node_device_state" in await asyncio.to_thread(flooded)


async def test_a_driver_that_hangs_at_the_start_leaves_known_gpus_unhealthy(
    machine: Node,
) -> None:
    await machine.kubelet.start()
    await machine.start(name="hangs")
    try:
        await machine.ready()
        ids = set(machine.kubelet.plugins[GPU].devices)
        await machine.stop()
        machine.driver.hang = "nvml"
        machine.driver.write()
        await machine.kubelet.restart()
        await machine.start()
        await machine.ready()
        assert set(machine.kubelet.plugins[GPU].devices) == ids
        assert not machine.kubelet.healthy(GPU)
        assert machine.agent is not None
        kinds = {finding.kind for finding in machine.agent.inventory.findings}
        assert FindingKind.DRIVER in kinds
        machine.driver.hang = ""
        machine.driver.write()
        await machine.gpus(8)
    finally:
        await machine.stop()
        await machine.kubelet.stop()


async def test_a_fault_survives_an_agent_restart_and_ends_with_a_reboot(
    machine: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.kubelet.start()
    await machine.start()
    try:
        await machine.ready()
        machine.driver.recovery[5] = -1
        machine.driver.xid(5, 79)
        await machine.gpus(7)
        await machine.stop()
        await machine.start()
        await machine.until(lambda: len(machine.kubelet.healthy(GPU)) == 7)
        assert state(machine, "gpu", machine.uuid(5)) is State.UNHEALTHY
        await machine.stop()
        other = machine.folder / "boot"
        other.write_text("another-boot\n")
        monkeypatch.setattr("flyer_node.agent.BOOT_ID", other)
        await machine.start()
        await machine.gpus(8)
    finally:
        await machine.stop()
        await machine.kubelet.stop()


async def test_the_kernels_log_names_processes_and_is_not_counted_twice(machine: Node) -> None:
    fifo = machine.folder / "kmsg"
    os.mkfifo(fifo)
    await machine.kubelet.start()
    await machine.start(kernel_log=str(fifo))
    try:
        await machine.ready()
        with fifo.open("w") as kernel:
            address = machine.fake.gpus[4].address[:-2]
            line = f"NVRM: Xid (PCI:{address}): 79, pid=4242, name=python, GPU has fallen off"
            kernel.write(f"6,1234,5678,-;{line}\n 6,1235,5679,-;noise\n")
            kernel.flush()
            await machine.gpus(7)
            machine.driver.xid(4, 79)
            assert machine.agent is not None
            record = machine.agent.health_store.health[Subject("gpu", machine.uuid(4))]
            assert "pid=4242" in record.evidence
            machine.driver.xid(0, 31)
            label = {"gpu": machine.uuid(0), "xid": "31", "class": "software"}
            await machine.until(lambda: machine.value("flyer_node_gpu_xid_total", **label) == 1)
            label = {"gpu": machine.uuid(4), "xid": "79", "class": "uncorrectable"}
            assert machine.value("flyer_node_gpu_xid_total", **label) == 1
    finally:
        await machine.stop()
        await machine.kubelet.stop()


async def test_a_second_agent_on_a_node_is_refused(node: Node) -> None:
    from flyer_node.agent import Agent

    assert node.agent is not None
    second = Agent(node.agent.settings)
    with pytest.raises(SettingError, match="a running agent"):
        await second.run()
    assert len(node.kubelet.healthy(GPU)) == 8


async def test_a_metrics_port_that_is_taken_is_named(node: Node) -> None:
    from flyer_node.agent import Agent

    assert node.agent is not None
    settings = replace(node.agent.settings, metrics_port=node.agent.http_server.port)
    with pytest.raises(
        SettingError,
        match=f"--metrics-port: invalid value '127.0.0.1:{node.agent.http_server.port}'",
    ):
        Agent(settings)


async def test_the_topology_file_lies_where_containers_mount_it(node: Node) -> None:
    """By the specification that the allocate names."""
    response = await node.kubelet.admit("fireflyer.dev/rdma-nccl", "a", 1)
    text = await asyncio.to_thread((node.folder / "state/nccl-topology.xml").read_text)
    paths = sorted((node.folder / "cdi").glob("*.json"))
    specifications = [json.loads(path.read_text()) for path in paths]
    mounts = [
        mount["hostPath"]
        for spec in specifications
        for device in spec["devices"]
        if f"{spec['kind']}={device['name']}" in {granted.name for granted in response.cdi_devices}
        for mount in device["containerEdits"].get("mounts", [])
    ]
    assert mounts == [str(node.folder / "state/nccl-topology.xml")]
    assert text.count('class="0x030200"') == 8
    assert text.count('class="0x020700"') == 1


async def test_every_series_exists_from_the_start_and_their_number_is_small(node: Node) -> None:
    assert node.agent is not None
    await node.gpus(8)
    lines = node.agent.metrics.text().decode().splitlines()
    series = [line for line in lines if not line.startswith("#")]
    assert len(series) <= 1500
    assert not [line for line in series if "None" in line]
    assert any(line.startswith("flyer_node_gpu_xid_total") for line in series)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def test_the_saved_state_is_readable_json(tmp_path: object) -> None:
    from flyer_node.inventory import Inventory
    from flyer_node.json_codec import from_json, to_json

    inventory = Inventory("n")
    assert from_json(Inventory, json.loads(json.dumps(to_json(inventory)))) == inventory

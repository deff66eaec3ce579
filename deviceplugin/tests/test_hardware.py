"""Hardware workers that are killed, hang or refuse, and their effect on other queries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from flyer_node.errors import HardwareError
from flyer_node.hardware.client import Deadlines, Hardware
from flyer_node.hardware.driver import DriverEvent, EventKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import Node

LONG_DEADLINES = Deadlines(facts=60, alive=60, status=60, sysfs=60, ports=60, listen=60, beat=60)


@contextlib.asynccontextmanager
async def hardware(
    node: Node, deadlines: Deadlines = LONG_DEADLINES
) -> AsyncIterator[tuple[Hardware, list[DriverEvent], list[str]]]:
    events: list[DriverEvent] = []
    kills: list[str] = []
    hw = Hardware(node.sysfs, deadlines=deadlines, on_event=events.append, on_kill=kills.append)
    try:
        yield hw, events, kills
    finally:
        await hw.close()


async def settled(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


async def test_the_real_bindings_read_the_fake_driver(machine: Node) -> None:
    machine.driver.remap[1] = (True, False)
    machine.driver.ecc[2] = 7
    machine.driver.links[4] = 3
    machine.driver.lost.add(5)
    machine.driver.recovery = {6: 4, 7: -1}
    machine.driver.write()
    async with hardware(machine) as (hw, _, kills):
        facts = await hw.facts()
        assert facts.driver_version == "550.90.07"
        assert [gpu.gpu.index for gpu in facts.gpus] == [0, 1, 2, 3, 4, 6, 7]
        assert [finding.where for finding in facts.findings] == ["nvml index 5"]
        first = facts.gpus[0]
        assert (first.gpu.address, first.gpu.minor) == ("0000:01:00.0", 0)
        assert first.gpu.compute_capability == (8, 0)
        assert first.link_peers == ("0000:21:00.0",) * 12
        statuses = await hw.status([machine.uuid(index) for index in range(8)])
        assert [status.answers for status in statuses] == [True] * 5 + [False] + [True] * 2
        assert statuses[1].remap_pending
        assert statuses[2].uncorrectable_errors == 7
        assert statuses[4].links_active == 3
        assert [status.recovery_action for status in statuses[5:]] == [None, 4, None]
        assert not kills


async def test_events_arrive_once_and_in_order(machine: Node) -> None:
    machine.driver.xid(0, 13)
    async with hardware(machine) as (hw, events, _):
        await hw.facts()
        await hw.listen([machine.uuid(index) for index in range(8)])
        for gpu, code in ((1, 31), (1, 31), (2, 79)):
            machine.driver.xid(gpu, code)
        await settled(lambda: len(events) >= 3)
        assert events == [
            DriverEvent(machine.uuid(gpu), EventKind.XID, code)
            for gpu, code in ((1, 31), (1, 31), (2, 79))
        ]
        assert hw.listening


async def test_ports_are_read_while_the_driver_hangs(machine: Node) -> None:
    machine.driver.hang = "nvml"
    machine.driver.write()
    async with hardware(machine, Deadlines(facts=3, ports=60)) as (hw, _, kills):
        waiting = asyncio.create_task(hw.facts())
        for _ in range(5):
            (port,) = await hw.ports()
            assert port.state == "active"
        with pytest.raises(HardwareError, match="no answer after 3 s") as excinfo:
            await waiting
        assert excinfo.value.kind == "hung"
        assert len(kills) == 1
        with pytest.raises(HardwareError, match="next query in"):
            await hw.facts()
        assert await hw.ports(), "no pause for the ports"
        machine.driver.hang = ""
        machine.driver.write()

        async def ports_answer() -> bool:
            with contextlib.suppress(HardwareError):
                return len((await hw.facts()).gpus) == 8
            return False

        async with asyncio.timeout(60):
            while not await ports_answer():
                await asyncio.sleep(0.1)


async def test_a_worker_that_is_killed_is_replaced(machine: Node) -> None:
    async with hardware(machine) as (hw, _, kills):
        for _ in range(3):
            assert len((await hw.facts()).gpus) == 8
            assert hw._worker is not None
            os.kill(hw._worker.process.pid, signal.SIGKILL)
            await settled(lambda: hw._worker is None)
        assert len(kills) == 3


async def test_a_hang_of_the_event_thread_alone_is_detected(machine: Node) -> None:
    deadlines = Deadlines(facts=60, status=60, sysfs=60, ports=60, listen=60, beat=2)
    async with hardware(machine, deadlines) as (hw, _, kills):
        await hw.facts()
        machine.driver.hang = "EventSetWait"
        machine.driver.write()
        await hw.listen([machine.uuid(0)])
        await settled(lambda: not hw.listening)
        assert kills == ["the event thread sent no heartbeat"]
        machine.driver.hang = ""
        machine.driver.write()
        await hw.listen([machine.uuid(0)])
        assert hw.listening


async def test_the_reason_of_a_refusal_is_reported(machine: Node) -> None:
    machine.driver.control.unlink()
    async with hardware(machine) as (hw, _, kills):
        with pytest.raises(HardwareError, match="Uninitialized") as excinfo:
            await hw.facts()
        assert excinfo.value.kind == "refused"
        assert not kills, "a refusal is an answer"


async def test_no_worker_outlives_its_parent(machine: Node) -> None:
    async with hardware(machine) as (hw, _, _kills):
        await hw.facts()
        assert hw._worker is not None
        pid = hw._worker.process.pid
        machine.driver.hang = "nvml"
        machine.driver.write()
        hung = asyncio.create_task(hw.facts())
        await asyncio.sleep(0)
        await hw.close()
        with pytest.raises(HardwareError):
            await hung
        await settled(lambda: not os.path.exists(f"/proc/{pid}"))  # noqa: PTH110


async def test_a_hang_differs_from_a_busy_node_by_the_workers_heartbeat(machine: Node) -> None:
    """Only a worker that runs while the driver does not answer shows a hang of the driver."""
    quick = replace(LONG_DEADLINES, alive=3, status=60)
    async with hardware(machine, quick) as (hw, _, kills):
        await hw.facts()
        machine.driver.hang = "nvmlDeviceGetHandleByUUID"
        machine.driver.write()
        with pytest.raises(HardwareError, match="no answer in 3 s in which the worker ran"):
            await hw.status([machine.uuid(0)])
        assert len(kills) == 1
    machine.driver.hang = ""
    machine.driver.write()
    async with hardware(machine, quick) as (hw, _, kills):
        await hw.facts()
        assert hw._worker is not None
        worker = hw._worker.process.pid
        os.kill(worker, signal.SIGSTOP)
        query = asyncio.create_task(hw.status([machine.uuid(0)]))
        finished, _ = await asyncio.wait([query], timeout=5)
        os.kill(worker, signal.SIGCONT)
        assert not finished, "a stopped worker sends no heartbeat, so the driver is not blamed"
        [status] = await query
        assert status.answers
        assert not kills


async def test_probes_report_link_width_and_failed_queries(machine: Node) -> None:
    machine.driver.width[1] = 8
    machine.driver.idle[2] = 999
    machine.driver.idle[3] = 3  # not supported
    machine.driver.lost.add(4)
    machine.driver.write()
    async with hardware(machine) as (hw, _, _):
        await hw.facts()
        probes = await hw.probe([machine.uuid(index) for index in range(5)])
    assert [(gpu.link_width, gpu.link_width_max) for gpu in probes[:2]] == [(16, 16), (8, 16)]
    assert probes[2].refused.startswith("its utilisation (")
    assert not probes[3].refused
    assert probes[4].refused.startswith("to answer (")

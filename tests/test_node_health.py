"""The node agent's report against the API that owns its shape, and through an API server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flyer.api.nodehealth import NodeHealth
from flyer_node.hardware.driver import GpuStatus
from flyer_node.health.policy import load_policy
from flyer_node.health.state_machine import DeviceHealth, State
from flyer_node.health.store import Change, HealthStore, Subject
from flyer_node.inventory.hca import PortStatus
from flyer_node.metrics import Metrics
from flyer_node.report.client import NodeHealthClient
from flyer_node.report.document import status_document
from flyer_node.report.events import REASONS, EventRecorder, TokenBucket
from flyer_node.report.reporter import Reporter

from deviceplugin.testing.harness import inventory_of
from deviceplugin.testing.sysfs import paper_node
from fakekube import ApiServer
from fakekube.apiserver.admission import AGENT, User

if TYPE_CHECKING:
    from flyer_node.inventory import Inventory

ON_NODE_1 = User(AGENT, extra={"authentication.kubernetes.io/node-name": ["node-1"]})
NOWHERE = Path("/nonexistent/token")


def node(folder: Path) -> Inventory:
    return replace(inventory_of(paper_node(), folder / "sys"), node="node-1", boot_id="b")


def document(inventory: Inventory, book: HealthStore, now: float = 100.0) -> dict[str, object]:
    return status_document(
        inventory, book.health, book.fault_events, agent_version="1", before={}, now=now
    )


def checked(status: dict[str, object]) -> NodeHealth:
    return NodeHealth.model_validate(
        {
            "apiVersion": "fireflyer.dev/v1alpha1",
            "kind": "NodeHealth",
            "metadata": {"name": "node-1"},
            "spec": {},
            "status": status,
        }
    )


def test_every_state_of_a_device_makes_a_status_that_the_api_accepts(tmp_path: Path) -> None:
    inventory = node(tmp_path)
    book = HealthStore(load_policy())
    book.track(inventory, 1.0)
    uuids = [gpu.uuid for gpu in inventory.gpus]
    states = {checked(document(inventory, book)).status.state.value}  # type: ignore[union-attr]
    book.xid(inventory, uuids[0], 63, 2.0, source="driver")
    states.add(checked(document(inventory, book)).status.state.value)  # type: ignore[union-attr]
    book.xid(inventory, uuids[1], 79, 3.0, source="driver")
    book.xid(inventory, uuids[2], 74, 3.0, source="driver")
    book.port_statuses([PortStatus("mlx5_0", 1, "down", "polling", {})], 4.0)
    book.port_statuses([PortStatus("mlx5_0", 1, "down", "polling", {})], 9.0)
    status = checked(document(inventory, book)).status
    assert status is not None
    states.add(status.state.value)
    kinds = {(device.kind, device.state.value) for device in status.devices}
    assert {("GPU", "Unhealthy"), ("NVLinkPair", "Unhealthy"), ("HCA", "Unhealthy")} <= kinds
    assert {fault.code for fault in status.faults} >= {"Xid79", "Xid74", "Xid63"}
    good = [GpuStatus(uuid, answers=True, recovery_action=0, links_active=12) for uuid in uuids]
    up = PortStatus("mlx5_0", 1, "active", "linkup", {})
    # A reset: they disappear and respond again.
    book.gpu_statuses(inventory, [GpuStatus(uuid, answers=False) for uuid in uuids], 4000.0)
    for now in (5000.0, 5001.0):
        book.gpu_statuses(inventory, good, now)
        book.port_statuses([up], now)
    states.add(checked(document(inventory, book)).status.state.value)  # type: ignore[union-attr]
    book.mark_unobservable(("gpu", "pair"), "the driver hangs")
    status = checked(document(inventory, book)).status
    assert status is not None
    states.add(status.state.value)
    assert status.reason == "NotObserved"
    assert states == {"Healthy", "Suspect", "Unhealthy", "Recovering", "Unknown"}


def test_unchanged_devices_keep_their_transition_times(tmp_path: Path) -> None:
    inventory = node(tmp_path)
    book = HealthStore(load_policy())
    book.track(inventory, 1.0)
    first = document(inventory, book, 100.0)
    again = status_document(
        inventory, book.health, book.fault_events, agent_version="1", before=first, now=999.0
    )
    assert again == first


async def test_the_object_is_created_once_and_written_only_after_changes(
    tmp_path: Path,
) -> None:
    inventory = node(tmp_path)
    book = HealthStore(load_policy())
    book.track(inventory, 1.0)
    async with ApiServer(user=ON_NODE_1) as api:
        client = NodeHealthClient(api.url, NOWHERE, NOWHERE, "node-1")
        metrics = Metrics()

        def make(before: object, now: float) -> dict[str, object]:
            return status_document(
                inventory,
                book.health,
                book.fault_events,
                agent_version="1",
                before=before,  # type: ignore[arg-type]
                now=now,
            )

        reporter = Reporter(client, make, metrics)
        running = asyncio.create_task(reporter.run())
        try:
            reporter.changed()
            await _until(lambda: metrics.value("flyer_node_report_writes_total", outcome="ok") == 1)
            reporter.changed()
            book.xid(inventory, inventory.gpus[0].uuid, 79, 5.0, source="driver")
            reporter.changed()
            await _until(lambda: reporter.written.get("state") == "Unhealthy")
            assert metrics.value("flyer_node_report_writes_total", outcome="ok") == 2
            assert metrics.value("flyer_node_report_writes_total", outcome="failed") == 0
        finally:
            running.cancel()


async def test_requests_to_an_unreachable_api_server_are_retried(tmp_path: Path) -> None:
    inventory = node(tmp_path)
    book = HealthStore(load_policy())
    book.track(inventory, 1.0)
    metrics = Metrics()
    api = ApiServer(user=ON_NODE_1)
    await api.start()
    port = int(api.url.rsplit(":", 1)[1])
    await api.close(keep_port=True)
    client = NodeHealthClient(api.url, NOWHERE, NOWHERE, "node-1")
    reporter = Reporter(client, lambda _before, now: document(inventory, book, now), metrics)
    running = asyncio.create_task(reporter.run())
    try:
        reporter.changed()
        await _until(lambda: metrics.value("flyer_node_report_writes_total", outcome="failed") >= 1)
        await api.start(port)
        await _until(lambda: metrics.value("flyer_node_report_writes_total", outcome="ok") >= 1)
    finally:
        running.cancel()
        await api.close()


async def _until(condition: object, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)


def change(name: str, before: State, after: DeviceHealth) -> Change:
    return Change(Subject("gpu", name), before, after)


async def test_events_name_the_node_count_up_and_are_bounded() -> None:
    metrics = Metrics()
    async with ApiServer(user=ON_NODE_1) as api:
        client = NodeHealthClient(api.url, NOWHERE, NOWHERE, "node-1")
        event_recorder = EventRecorder(client, metrics, TokenBucket(burst=4, seconds_each=3600))
        running = asyncio.create_task(event_recorder.run())
        bad = DeviceHealth(
            last_state=State.UNHEALTHY, reason="Xid79", message="fell off the bus", remedy="reboot"
        )
        try:
            for health_change in (
                change("G0", State.HEALTHY, bad),
                change(
                    "G0", State.UNHEALTHY, DeviceHealth(last_state=State.RECOVERING, reason="Xid79")
                ),
                change("G0", State.RECOVERING, bad),
                change("G0", State.UNHEALTHY, DeviceHealth()),
                change("G1", State.HEALTHY, bad),
            ):
                event_recorder.record(health_change)
            await _until(lambda: metrics.value("flyer_node_events_total", outcome="dropped") == 1)
        finally:
            running.cancel()
        events = {event["reason"]: event for event in api.store.all("events")}
    assert metrics.value("flyer_node_events_total", outcome="posted") == 4
    assert set(events) == {"DeviceUnhealthy", "DeviceRecovering", "DeviceHealthy"}
    assert set(REASONS.values()) >= set(events)
    first = events["DeviceUnhealthy"]
    assert (first["count"], first["type"], events["DeviceHealthy"]["type"]) == (
        2, "Warning", "Normal",
    )  # fmt: skip
    assert first["involvedObject"]["name"] == "node-1"
    assert first["message"] == (
        "gpu G0: Recovering -> Unhealthy (Xid79: fell off the bus); needs reboot"
    )


async def test_a_refused_event_is_dropped_and_counted() -> None:
    metrics = Metrics()
    api = ApiServer(user=ON_NODE_1)
    await api.start()
    await api.close(keep_port=True)
    client = NodeHealthClient(api.url, NOWHERE, NOWHERE, "node-1")
    event_recorder = EventRecorder(client, metrics)
    running = asyncio.create_task(event_recorder.run())
    try:
        event_recorder.record(
            change("G0", State.HEALTHY, DeviceHealth(last_state=State.UNHEALTHY, reason="x"))
        )
        await _until(lambda: metrics.value("flyer_node_events_total", outcome="failed") == 1)
    finally:
        running.cancel()
        await api.close()


def test_a_token_bucket_is_refilled() -> None:
    bucket = TokenBucket(burst=2, seconds_each=10)
    assert [bucket.take(now) for now in (100, 100, 100, 105, 110, 111)] == [
        True, True, False, False, True, False,
    ]  # fmt: skip
    assert [bucket.take(1000) for _ in range(3)] == [True, True, False]

"""Node agent: one event loop over hardware, health, kubelet and API server.

At startup the agent reads the inventory, polls health once and then registers with the kubelet, so
that a broken GPU is never advertised before its first health check. A driver that hangs at startup
delays registration by its deadline; the GPUs of the last inventory are then advertised as unhealthy
until the driver answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from flyer_node.errors import DataError, HardwareError
from flyer_node.hardware.client import Deadlines, Hardware
from flyer_node.hardware.driver import DriverEvent, EventKind
from flyer_node.health.detectors import kernel_xid
from flyer_node.health.kmsg import KernelLog
from flyer_node.health.policy import load_policy
from flyer_node.health.store import HealthStore
from flyer_node.heap import trim_heap
from flyer_node.http_server import Heartbeat, HttpServer
from flyer_node.inventory import Finding, FindingKind, Inventory
from flyer_node.inventory.assemble import DriverFacts, SysfsFacts, assemble
from flyer_node.inventory.nccl import nccl_topology
from flyer_node.metrics import Metrics
from flyer_node.plugin.cdi_folder import CdiFolder, nvidia_cdi_gpus
from flyer_node.plugin.device_lists import DeviceLists
from flyer_node.plugin.node_view import NodeView
from flyer_node.plugin.registrar import Registrar
from flyer_node.plugin.resources import RESOURCES
from flyer_node.report.client import NodeHealthClient
from flyer_node.report.document import status_document
from flyer_node.report.events import EventRecorder
from flyer_node.report.reporter import Reporter
from flyer_node.state_folder import StateFolder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from flyer_node.settings import Settings

__all__ = ["Agent"]

INVENTORY_SECONDS = 60.0
"""Interval of inventory refreshes."""
POLL_FAILURES_MAX = 3
"""Consecutive failed polls (for example a worker that died) after which devices are Unknown. One
hang is enough."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = structlog.get_logger()


class Agent:
    """The node agent process."""

    def __init__(self, settings: Settings, deadlines: Deadlines | None = None) -> None:
        self.settings = settings
        self.policy = load_policy(settings.policy)
        self.metrics = Metrics(RESOURCES)
        self.health_store = HealthStore(self.policy)
        self.inventory = Inventory(settings.name)
        self.device_lists = DeviceLists(NodeView(self.inventory))
        self.heartbeat = Heartbeat()
        self._state = StateFolder(settings.state_folder)
        self._hardware = Hardware(
            settings.sysfs_root,
            deadlines=deadlines,
            on_event=self._on_event,
            on_kill=self._on_kill,
        )
        self._poll_now = asyncio.Event()
        self._poll_failures = {"driver": 0, "sysfs": 0}
        self._topology = ""
        self._cdi = CdiFolder(settings.cdi_folder)
        self._last_error: dict[str, str] = {}
        self._unresponsive: set[str] = set()
        self.http_server = HttpServer(
            settings.metrics_address, settings.metrics_port, self.metrics.text, self.heartbeat
        )
        self.event_recorder: EventRecorder | None = None
        self.reporter = self._make_reporter()

    async def run(self) -> None:
        """Runs until cancelled."""
        self._state.open()
        self.http_server.start()
        registrar = Registrar(
            self.settings.plugin_folder, RESOURCES, self.device_lists, self.metrics
        )
        kernel_log = self._make_kernel_log()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._initialize()
            if kernel_log is not None and (why := kernel_log.start()):
                log.info("kernel log not read; driver events report the same Xids", reason=why)
            poll = self.settings.poll_seconds
            loops: list[Awaitable[None]] = [
                registrar.run(),
                self._every(poll, self._poll_gpus, at_once=self._poll_now),
                self._every(poll, self._poll_ports),
                self._every(INVENTORY_SECONDS, self._refresh_inventory, wait_first=True),
                self._heartbeat(registrar),
            ]
            if self.reporter is not None:
                loops.append(self.reporter.run())
            if self.event_recorder is not None:
                loops.append(self.event_recorder.run())
            trim_heap()
            tasks = [asyncio.ensure_future(loop) for loop in loops]
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if kernel_log is not None:
                kernel_log.stop()
            await self._hardware.close()
            self.http_server.stop()
            self._state.close()

    async def _initialize(self) -> None:
        saved = self._state.load()
        if saved is not None:
            self.inventory = saved.inventory
        await self._refresh_inventory()
        now = time.time()
        self.health_store.track(self.inventory, now)
        if saved is not None:
            same = saved.inventory.boot_id == self.inventory.boot_id
            self.health_store.restore(saved.health, same_boot=same)
        await self._poll_gpus()
        await self._poll_ports()
        self._publish()

    async def _every(
        self,
        seconds: float,
        act: Callable[[], Awaitable[None]],
        *,
        wait_first: bool = False,
        at_once: asyncio.Event | None = None,
    ) -> None:
        if wait_first:
            await asyncio.sleep(seconds)
        while True:
            started = time.monotonic()
            if at_once is not None:
                at_once.clear()
            await act()
            pause = max(0.05, seconds - (time.monotonic() - started))
            if at_once is None:
                await asyncio.sleep(pause)
            else:
                await asyncio.sleep(0.05)  # coalesces an event storm into one poll
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(at_once.wait(), pause)

    async def _heartbeat(self, registrar: Registrar) -> None:
        while True:
            self.heartbeat.beat()
            self.heartbeat.ready = registrar.registered
            await asyncio.sleep(0.25)

    async def _refresh_inventory(self) -> None:
        """Reads the inventory again; unreadable parts keep their values, with a finding."""
        before = self.inventory
        extra: list[Finding] = []
        try:
            sysfs = await self._hardware.sysfs()
        except (HardwareError, DataError) as error:
            sysfs = SysfsFacts(before.numa_nodes, before.pci, before.hcas)
            extra.append(Finding(FindingKind.UNREADABLE, "sysfs", str(error)))
        try:
            driver = await self._hardware.facts()
            listed = {item.gpu.uuid for item in driver.gpus}
            # An unlisted GPU was removed if the node has rebooted; otherwise it fell off the bus.
            same_boot = before.boot_id == _boot_id()
            missing = [gpu.uuid for gpu in before.gpus if same_boot and gpu.uuid not in listed]
        except (HardwareError, DataError) as error:
            driver, missing = DriverFacts(before.driver_version), [gpu.uuid for gpu in before.gpus]
            extra.append(Finding(FindingKind.DRIVER, "driver", str(error)))
        current = assemble(
            self.settings.name, sysfs, driver, boot_id=_boot_id(), known_bridges=before.bridges
        )
        inventory = _with_missing(current, before, missing, extra)
        if inventory != before or not self._topology:
            if set(inventory.gpus_by_uuid) != set(before.gpus_by_uuid):
                self._hardware.renew()  # event subscriptions are renewed for all GPUs
            self.inventory = inventory
            self.health_store.track(inventory, time.time())
            self.metrics.track(inventory, self.policy)
            self._topology = self._state.write_topology(nccl_topology(inventory))
            log.info(
                "inventory",
                gpus=len(inventory.gpus),
                pairs=len(inventory.bridges),
                hcas=len(inventory.hcas),
                findings=[f"{item.where}: {item.detail}" for item in inventory.findings][:8],
            )
            self._publish()
        else:
            # Device nodes and NVIDIA's specification change independently of the inventory.
            self.device_lists.publish(self._view())
        self.metrics.observed.labels("inventory").set_to_current_time()

    async def _poll_gpus(self) -> None:
        uuids = [gpu.uuid for gpu in self.inventory.gpus]
        if not uuids:
            return
        try:
            statuses = await self._hardware.status(uuids)
            if not self._hardware.listening:
                await self._hardware.listen(uuids)
        except (HardwareError, DataError) as error:
            self._poll_failed("driver", error)
            return
        self._poll_failures["driver"] = 0
        self._last_error.pop("driver", None)
        self.metrics.observed.labels("driver").set_to_current_time()
        if self._hardware.listening:
            self.metrics.observed.labels("events").set_to_current_time()
        unresponsive = {status.uuid for status in statuses if not status.answers}
        if self._unresponsive - unresponsive:
            self._hardware.renew()
        self._unresponsive = unresponsive
        self.health_store.gpu_statuses(self.inventory, statuses, time.time())
        await self._probe_gpus()
        self._publish_changes()

    async def _probe_gpus(self) -> None:
        """Probes the GPUs whose probation starts or ends now."""
        uuids = self.health_store.gpus_to_probe(self.inventory, time.time())
        if not uuids:
            return
        try:
            samples = await self._hardware.probe(uuids)
        except (HardwareError, DataError) as error:
            self._poll_failed("driver", error)
            return
        self.metrics.probes.inc(len(samples))
        self.health_store.gpus_probed(self.inventory, samples, time.time())

    async def _poll_ports(self) -> None:
        if not self.inventory.hcas:
            return
        try:
            statuses = await self._hardware.ports()
        except (HardwareError, DataError) as error:
            self._poll_failed("sysfs", error)
            return
        self._poll_failures["sysfs"] = 0
        self._last_error.pop("sysfs", None)
        self.metrics.observed.labels("ports").set_to_current_time()
        self.metrics.ports(statuses)
        self.health_store.port_statuses(statuses, time.time())
        self._publish_changes()

    def _poll_failed(self, source: str, error: Exception) -> None:
        """Counts a failed poll; after POLL_FAILURES_MAX of them the devices are Unknown."""
        self._poll_failures[source] += 1
        text = str(error)
        hung = isinstance(error, HardwareError) and error.kind == "hung"
        if self._last_error.get(source) is None:
            log.warning("hardware does not answer", source=source, error=text)
        self._last_error[source] = text
        if hung or self._poll_failures[source] >= POLL_FAILURES_MAX:
            reason = "the driver hangs" if source == "driver" else "sysfs cannot be read"
            self.health_store.mark_unobservable(
                ("gpu", "pair") if source == "driver" else ("hca",), reason
            )
            self._publish_changes()

    def _on_event(self, event: DriverEvent) -> None:
        if event.kind is EventKind.XID:
            self._xid(event.uuid, event.data, source="driver")
        else:
            log.warning("driver event", gpu=event.uuid, kind=event.kind.value, data=event.data)
            self.health_store.event(event.uuid, event.kind, time.time())
            self._publish_changes()
        # The GPU's status shows the effect: lost, or a recovery action requested by the driver.
        self._poll_now.set()

    def _on_kernel_line(self, line: str) -> None:
        self.metrics.observed.labels("kernel-log").set_to_current_time()
        xid = kernel_xid(line)
        if xid is None:
            return
        for gpu in self.inventory.gpus:
            if gpu.address.startswith(xid.address) or xid.address.endswith(gpu.address[:-2]):
                self._xid(gpu.uuid, xid.code, source="kernel", process=xid.process, line=xid.line)

    def _xid(self, uuid: str, code: int, *, source: str, **details: str) -> None:
        fresh = self.health_store.xid(
            self.inventory, uuid, code, time.time(), source=source, **details
        )
        if fresh:
            self.metrics.xids.labels(uuid, str(code), self.policy.rule(code).klass).inc()
            log.warning("xid", gpu=uuid, xid=code, source=source, **details)
            self._publish_changes()
            if self.reporter is not None:
                self.reporter.changed()

    def _on_kill(self, why: str) -> None:
        self.metrics.worker_kills.inc()
        log.warning("hardware worker replaced", reason=why)

    def _publish_changes(self) -> None:
        changes = self.health_store.drain_changes()
        for change in changes:
            self.metrics.changed(change)
            if self.event_recorder is not None:
                self.event_recorder.record(change)
            log.warning(
                "device",
                kind=change.subject.kind,
                id=change.subject.id,
                before=change.before.value,
                after=change.after.state.value,
                reason=change.after.reason or change.after.unobservable_reason,
            )
        if changes:
            self._publish()

    def _view(self) -> NodeView:
        """Inventory and health; in mode `cdi` also writes the CDI specifications."""
        settings, health_store = self.settings, self.health_store
        view = NodeView(
            self.inventory,
            bad_gpus=health_store.out_of_service("gpu"),
            bad_pairs=health_store.out_of_service("pair"),
            bad_ports=health_store.out_of_service("hca"),
            device_mode=settings.device_mode,
            device_root=settings.device_root,
            slots=settings.slots,
            topology_file=self._topology,
            exists=self._device_exists,
        )
        if settings.device_mode == "cdi":
            nvidia = nvidia_cdi_gpus((settings.cdi_static_folder, settings.cdi_folder))
            view = replace(view, cdi_error=self._cdi.write(view), nvidia_cdi=nvidia)
        return view

    def _publish(self) -> None:
        """Publishes the current state to kubelet, metrics, disk and API server, in this order."""
        health_store = self.health_store
        self.device_lists.publish(self._view())
        for name in RESOURCES:
            devices = self.device_lists.resource(name).devices()
            healthy = sum(device.healthy for device in devices)
            self.metrics.devices.labels(name, "healthy").set(healthy)
            self.metrics.devices.labels(name, "unhealthy").set(len(devices) - healthy)
        self.metrics.states(health_store.health)
        try:
            self._state.save(self.inventory, health_store.health)
        except OSError as error:
            log.warning("state not saved", error=str(error))
        if self.reporter is not None:
            self.reporter.changed()

    def _device_exists(self, path: str) -> bool:
        below = path.removeprefix(self.settings.device_root).lstrip("/")
        return (self.settings.device_view / below).exists()

    def _make_kernel_log(self) -> KernelLog | None:
        if self.settings.kernel_log is None:
            return None
        counter = self.metrics.kernel_log_lost
        return KernelLog(self.settings.kernel_log, self._on_kernel_line, counter.inc)

    def _make_reporter(self) -> Reporter | None:
        settings = self.settings
        if not settings.api_server:
            log.info("no API server configured: NodeHealth is not written")
            return None
        client = NodeHealthClient(
            settings.api_server, settings.api_token_file, settings.api_ca_file, settings.name
        )
        self.event_recorder = EventRecorder(client, self.metrics)
        return Reporter(client, self._document, self.metrics)

    def _document(self, before: Mapping[str, Any], now: float) -> dict[str, Any]:
        return status_document(
            self.inventory,
            self.health_store.health,
            self.health_store.fault_events,
            agent_version=version("flyer-node"),
            before=before,
            now=now,
        )


def _with_missing(
    current: Inventory, before: Inventory, missing: list[str], extra: list[Finding]
) -> Inventory:
    """Keeps GPUs that the driver no longer lists, so that their ids stay as unhealthy devices."""
    missing_gpus = tuple(gpu for gpu in before.gpus if gpu.uuid in missing)
    gpus = tuple(sorted((*current.gpus, *missing_gpus), key=lambda gpu: (gpu.index, gpu.uuid)))
    present = {gpu.uuid for gpu in gpus}
    bridges = {bridge.id: bridge for bridge in before.bridges}
    bridges |= {bridge.id: bridge for bridge in current.bridges}
    return replace(
        current,
        gpus=gpus,
        bridges=tuple(pair for pair in bridges.values() if {pair.first, pair.second} <= present),
        findings=tuple(dict.fromkeys((*current.findings, *extra))),
    )


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""

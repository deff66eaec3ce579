"""The agent: one event loop over hardware, health, kubelet and API server.

Order at the start: what the node has, one look at its health, then the kubelet. So no GPU that is
broken is ever offered because nobody has looked yet. A driver that hangs at the start delays that
by its deadline; then the GPUs of the last inventory are offered as unhealthy until it answers.
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

from flyer_node.cdi import CdiFolder, nvidia_specifications
from flyer_node.errors import DataError, HardwareError
from flyer_node.hardware.client import Deadlines, Hardware
from flyer_node.hardware.driver import DriverEvent, EventKind
from flyer_node.health.kmsg import KernelLog
from flyer_node.health.ledger import Ledger
from flyer_node.health.policy import load_policy
from flyer_node.health.signs import kernel_xid
from flyer_node.inventory import Finding, FindingKind, Inventory
from flyer_node.inventory.assemble import DriverFacts, SysfsFacts, assemble
from flyer_node.inventory.nccl import nccl_topology
from flyer_node.memory import give_back
from flyer_node.metrics import Metrics
from flyer_node.plugin.offers import Offers
from flyer_node.plugin.registrar import Registrar
from flyer_node.plugin.resources import RESOURCES, NodeView
from flyer_node.report.client import NodeHealthClient
from flyer_node.report.document import status_document
from flyer_node.report.events import Announcer
from flyer_node.report.reporter import Reporter
from flyer_node.state import StateFolder
from flyer_node.web import Pulse, Web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from flyer_node.settings import Settings

__all__ = ["Agent"]

INVENTORY_SECONDS = 60.0
"""Hardware that is added or renamed is seen within so long."""
MISSES_MAX = 3
"""Looks in a row that may fail (a worker that died) before devices count as Unknown. A hang is
known after one."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = structlog.get_logger()


class Agent:
    """Everything that runs on one node."""

    def __init__(self, settings: Settings, deadlines: Deadlines | None = None) -> None:
        self.settings = settings
        self.policy = load_policy(settings.policy)
        self.metrics = Metrics(RESOURCES)
        self.ledger = Ledger(self.policy)
        self.inventory = Inventory(settings.name)
        self.offers = Offers(NodeView(self.inventory))
        self.pulse = Pulse()
        self._state = StateFolder(settings.state_folder)
        self._hardware = Hardware(
            settings.sysfs_root,
            deadlines=deadlines,
            on_event=self._on_event,
            on_kill=self._on_kill,
        )
        self._look_now = asyncio.Event()
        self._misses = {"driver": 0, "sysfs": 0}
        self._topology = ""
        self._cdi = CdiFolder(settings.cdi_folder)
        self._last_error: dict[str, str] = {}
        self._gone: set[str] = set()
        self.web = Web(
            settings.metrics_address, settings.metrics_port, self.metrics.text, self.pulse
        )
        self.announcer: Announcer | None = None
        self.reporter = self._make_reporter()

    async def run(self) -> None:
        """Until cancelled."""
        self._state.open()
        self.web.start()
        registrar = Registrar(self.settings.plugin_folder, RESOURCES, self.offers, self.metrics)
        kernel_log = self._make_kernel_log()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._begin()
            if kernel_log is not None and (why := kernel_log.start()):
                log.info("kernel log is not read; the driver's events tell the same", reason=why)
            poll = self.settings.poll_seconds
            loops: list[Awaitable[None]] = [
                registrar.run(),
                self._every(poll, self._look_at_gpus, at_once=self._look_now),
                self._every(poll, self._look_at_ports),
                self._every(INVENTORY_SECONDS, self._take_inventory, wait_first=True),
                self._beat(registrar),
            ]
            if self.reporter is not None:
                loops.append(self.reporter.run())
            if self.announcer is not None:
                loops.append(self.announcer.run())
            give_back()
            tasks = [asyncio.ensure_future(one) for one in loops]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if kernel_log is not None:
                kernel_log.stop()
            await self._hardware.close()
            self.web.stop()
            self._state.close()

    async def _begin(self) -> None:
        saved = self._state.load()
        if saved is not None:
            self.inventory = saved.inventory
        await self._take_inventory()
        now = time.time()
        self.ledger.know(self.inventory, now)
        if saved is not None:
            same = saved.inventory.boot_id == self.inventory.boot_id
            self.ledger.restore(saved.health, same_boot=same)
        await self._look_at_gpus()
        await self._look_at_ports()
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
                await asyncio.sleep(0.05)  # events in a storm are looked at together
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(at_once.wait(), pause)

    async def _beat(self, registrar: Registrar) -> None:
        while True:
            self.pulse.beat()
            self.pulse.ready = registrar.registered
            await asyncio.sleep(0.25)

    async def _take_inventory(self) -> None:
        """Reads everything anew; what cannot be read stays as it was, with a finding."""
        before = self.inventory
        extra: list[Finding] = []
        try:
            sysfs = await self._hardware.sysfs()
        except (HardwareError, DataError) as error:
            sysfs = SysfsFacts(before.numa_nodes, before.pci, before.hcas)
            extra.append(Finding(FindingKind.UNREADABLE, "sysfs", str(error)))
        try:
            driver = await self._hardware.facts()
            listed = {one.gpu.uuid for one in driver.gpus}
            # After a reboot a GPU that is not listed is not there; before one it fell off.
            same_boot = before.boot_id == _boot_id()
            missing = [one.uuid for one in before.gpus if same_boot and one.uuid not in listed]
        except (HardwareError, DataError) as error:
            driver, missing = DriverFacts(before.driver_version), [one.uuid for one in before.gpus]
            extra.append(Finding(FindingKind.DRIVER, "driver", str(error)))
        found = assemble(
            self.settings.name, sysfs, driver, boot_id=_boot_id(), known_bridges=before.bridges
        )
        inventory = _with_missing(found, before, missing, extra)
        if inventory != before or not self._topology:
            if set(inventory.gpus_by_uuid) != set(before.gpus_by_uuid):
                self._hardware.renew()  # events are asked for anew, for all of them
            self.inventory = inventory
            self.ledger.know(inventory, time.time())
            self.metrics.know(inventory, self.policy)
            self._topology = self._state.write_topology(nccl_topology(inventory))
            log.info(
                "inventory",
                gpus=len(inventory.gpus),
                pairs=len(inventory.bridges),
                hcas=len(inventory.hcas),
                findings=[f"{one.where}: {one.detail}" for one in inventory.findings][:8],
            )
            self._publish()
        else:
            # Device nodes and NVIDIA's specification come and go without a change of the inventory.
            self.offers.publish(self._view())
        self.metrics.observed.labels("inventory").set_to_current_time()

    async def _look_at_gpus(self) -> None:
        uuids = [gpu.uuid for gpu in self.inventory.gpus]
        if not uuids:
            return
        try:
            statuses = await self._hardware.status(uuids)
            if not self._hardware.listening:
                await self._hardware.listen(uuids)
        except (HardwareError, DataError) as error:
            self._missed("driver", error)
            return
        self._misses["driver"] = 0
        self._last_error.pop("driver", None)
        self.metrics.observed.labels("driver").set_to_current_time()
        if self._hardware.listening:
            self.metrics.observed.labels("events").set_to_current_time()
        gone = {status.uuid for status in statuses if not status.answers}
        if self._gone - gone:
            self._hardware.renew()
        self._gone = gone
        self.ledger.gpu_statuses(self.inventory, statuses, time.time())
        await self._probe_gpus()
        self._publish_changes()

    async def _probe_gpus(self) -> None:
        """Devices on probation return only after a closer look, from the worker as all others."""
        wanted = self.ledger.gpus_to_probe(self.inventory, time.time())
        if not wanted:
            return
        try:
            found = await self._hardware.probe(wanted)
        except (HardwareError, DataError) as error:
            self._missed("driver", error)
            return
        self.metrics.probes.inc(len(found))
        self.ledger.gpus_probed(self.inventory, found, time.time())

    async def _look_at_ports(self) -> None:
        if not self.inventory.hcas:
            return
        try:
            statuses = await self._hardware.ports()
        except (HardwareError, DataError) as error:
            self._missed("sysfs", error)
            return
        self._misses["sysfs"] = 0
        self._last_error.pop("sysfs", None)
        self.metrics.observed.labels("ports").set_to_current_time()
        self.metrics.ports(statuses)
        self.ledger.port_statuses(statuses, time.time())
        self._publish_changes()

    def _missed(self, source: str, error: Exception) -> None:
        """A look that gave nothing; after enough of them the devices are Unknown."""
        self._misses[source] += 1
        text = str(error)
        hung = isinstance(error, HardwareError) and error.kind == "hung"
        if self._last_error.get(source) is None:
            log.warning("hardware does not answer", source=source, error=text)
        self._last_error[source] = text
        if hung or self._misses[source] >= MISSES_MAX:
            reason = "the driver hangs" if source == "driver" else "sysfs cannot be read"
            self.ledger.blind(("gpu", "pair") if source == "driver" else ("hca",), reason)
            self._publish_changes()

    def _on_event(self, event: DriverEvent) -> None:
        if event.kind is EventKind.XID:
            self._xid(event.uuid, event.data, source="driver")
        else:
            log.warning("driver event", gpu=event.uuid, kind=event.kind.value, data=event.data)
            self.ledger.event(event.uuid, event.kind, time.time())
            self._publish_changes()
        # What it did to the GPU is in its status: lost, or an action that the driver asks for.
        self._look_now.set()

    def _on_kernel_line(self, line: str) -> None:
        self.metrics.observed.labels("kernel-log").set_to_current_time()
        seen = kernel_xid(line)
        if seen is None:
            return
        for gpu in self.inventory.gpus:
            if gpu.address.startswith(seen.address) or seen.address.endswith(gpu.address[:-2]):
                self._xid(
                    gpu.uuid, seen.code, source="kernel", process=seen.process, line=seen.line
                )

    def _xid(self, uuid: str, code: int, *, source: str, **seen: str) -> None:
        fresh = self.ledger.xid(self.inventory, uuid, code, time.time(), source=source, **seen)
        if fresh:
            self.metrics.xids.labels(uuid, str(code), self.policy.rule(code).klass).inc()
            log.warning("xid", gpu=uuid, xid=code, source=source, **seen)
            self._publish_changes()
            if self.reporter is not None:
                self.reporter.changed()

    def _on_kill(self, why: str) -> None:
        self.metrics.worker_kills.inc()
        log.warning("hardware worker replaced", reason=why)

    def _publish_changes(self) -> None:
        changes = self.ledger.take_changes()
        for change in changes:
            self.metrics.changed(change)
            if self.announcer is not None:
                self.announcer.tell(change)
            log.warning(
                "device",
                kind=change.subject.kind,
                id=change.subject.id,
                before=change.before.value,
                after=change.after.state.value,
                reason=change.after.reason or change.after.blind_reason,
            )
        if changes:
            self._publish()

    def _view(self) -> NodeView:
        """Inventory and health; in mode `cdi` with specifications that the runtime can read."""
        settings, ledger = self.settings, self.ledger
        view = NodeView(
            self.inventory,
            bad_gpus=ledger.out_of_service("gpu"),
            bad_pairs=ledger.out_of_service("pair"),
            bad_ports=ledger.out_of_service("hca"),
            device_mode=settings.device_mode,
            device_root=settings.device_root,
            slots=settings.slots,
            topology_file=self._topology,
            exists=self._device_exists,
        )
        if settings.device_mode == "cdi":
            nvidia = nvidia_specifications((settings.cdi_static_folder, settings.cdi_folder))
            view = replace(view, cdi_error=self._cdi.write(view), nvidia_cdi=nvidia)
        return view

    def _publish(self) -> None:
        """The newest facts to kubelet, metrics, disk and API server, in this order."""
        ledger = self.ledger
        self.offers.publish(self._view())
        for name in RESOURCES:
            devices = self.offers.resource(name).devices()
            healthy = sum(device.healthy for device in devices)
            self.metrics.devices.labels(name, "healthy").set(healthy)
            self.metrics.devices.labels(name, "unhealthy").set(len(devices) - healthy)
        self.metrics.states(ledger.health)
        try:
            self._state.save(self.inventory, ledger.health)
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
        lost = self.metrics.kernel_log_lost
        return KernelLog(self.settings.kernel_log, self._on_kernel_line, lost.inc)

    def _make_reporter(self) -> Reporter | None:
        settings = self.settings
        if not settings.api_server:
            log.info("no API server: NodeHealth is not written")
            return None
        client = NodeHealthClient(
            settings.api_server, settings.api_token_file, settings.api_ca_file, settings.name
        )
        self.announcer = Announcer(client, self.metrics)
        return Reporter(client, self._document, self.metrics)

    def _document(self, before: Mapping[str, Any], now: float) -> dict[str, Any]:
        return status_document(
            self.inventory,
            self.ledger.health,
            self.ledger.happened,
            agent_version=version("flyer-node"),
            before=before,
            now=now,
        )


def _with_missing(
    found: Inventory, before: Inventory, missing: list[str], extra: list[Finding]
) -> Inventory:
    """Keeps GPUs that the driver does not list now: their ids must stay, as unhealthy devices."""
    kept = tuple(gpu for gpu in before.gpus if gpu.uuid in missing)
    gpus = tuple(sorted((*found.gpus, *kept), key=lambda gpu: (gpu.index, gpu.uuid)))
    present = {gpu.uuid for gpu in gpus}
    bridges = {bridge.id: bridge for bridge in before.bridges}
    bridges |= {bridge.id: bridge for bridge in found.bridges}
    return replace(
        found,
        gpus=gpus,
        bridges=tuple(one for one in bridges.values() if {one.first, one.second} <= present),
        findings=tuple(dict.fromkeys((*found.findings, *extra))),
    )


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""

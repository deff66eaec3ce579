"""A node's plugin side on a fake kubelet, without hardware: sockets, registrar, device_lists.

For tests of the protocol. Health is whatever the test publishes.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flyer_node.inventory import Gpu, Inventory
from flyer_node.inventory.assemble import DriverFacts, DriverGpu, assemble, read_sysfs
from flyer_node.metrics import Metrics
from flyer_node.plugin.device_lists import DeviceLists
from flyer_node.plugin.node_view import NodeView
from flyer_node.plugin.registrar import Registrar
from flyer_node.plugin.resources import RESOURCES

from deviceplugin.testing.kubelet import FakeKubelet
from deviceplugin.testing.sysfs import FakeNode, paper_node, write_sysfs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["PluginHarness", "inventory_of", "plugin_harness"]

LINKS = 12
"""Number of NVLink links of a pair of A100s."""
ENDING_SECONDS = 20.0


def inventory_of(node: FakeNode, folder: Path) -> Inventory:
    """The inventory of a fake node whose sysfs is written to `folder`."""
    gpus = tuple(
        DriverGpu(
            Gpu(gpu.uuid, index, index, gpu.address),
            () if gpu.peer is None else (node.gpus[gpu.peer].address,) * LINKS,
        )
        for index, gpu in enumerate(node.gpus)
    )
    return assemble("node", read_sysfs(write_sysfs(node, folder)), DriverFacts("550", gpus))


@dataclass
class PluginHarness:
    """The running agent and its settings."""

    kubelet: FakeKubelet
    device_lists: DeviceLists
    metrics: Metrics
    registrar: Registrar
    view: NodeView

    def count(self, name: str, **labels: str) -> float:
        """A metric's value; it must be there."""
        return self.metrics.value(name, **labels)

    async def ready(self) -> float:
        """Until every resource is registered and listed; how long it took."""
        return await self.kubelet.until(
            lambda: (
                len(self.kubelet.plugins) == len(RESOURCES)
                and all(
                    plugin.connected and plugin.messages for plugin in self.kubelet.plugins.values()
                )
            ),
            description="all resources registered and listed",
        )


@contextlib.asynccontextmanager
async def plugin_harness(view: NodeView | None = None) -> AsyncIterator[PluginHarness]:
    """A kubelet and a registrar; by default on the paper's node."""
    # Sockets' paths are at most 107 bytes: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="fn") as short:
        folder = Path(short) / "p"
        folder.mkdir()
        tasks = asyncio.all_tasks()
        if view is None:
            view = NodeView(inventory_of(paper_node(), Path(short) / "sys"))
        metrics = Metrics(RESOURCES)
        device_lists = DeviceLists(view)
        registrar = Registrar(folder, RESOURCES, device_lists, metrics)
        kubelet = FakeKubelet(folder)
        await kubelet.start()
        running = asyncio.create_task(registrar.run())
        try:
            yield PluginHarness(kubelet, device_lists, metrics, registrar, view)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await kubelet.stop()
        assert not [entry for entry in folder.iterdir() if entry.name.startswith("flyer-")]
        await _ended(tasks)


async def _ended(before: set[asyncio.Task[object]]) -> None:
    """Every stream and server has ended; their tasks need some turns of the loop for that."""
    expected = {*before, asyncio.current_task()}
    try:
        async with asyncio.timeout(ENDING_SECONDS):
            while asyncio.all_tasks() - expected:  # noqa: ASYNC110 - no notification exists
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"left behind: {asyncio.all_tasks() - expected}") from None

"""A simulated node: sysfs tree, fake driver, fake kubelet, and the agent."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flyer_node.agent import Agent
from flyer_node.hardware.client import Deadlines
from flyer_node.plugin.resources import GPU, RESOURCES
from flyer_node.settings import settings_from

from deviceplugin.testing.kubelet import FakeKubelet
from deviceplugin.testing.nvml import StubDriver, build_stub
from deviceplugin.testing.sysfs import FakeNode, paper_node, write_sysfs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

POLICY = """
version = "test"
[timers]
gpu_hold = 0.3
gpu_hold_max = 2.0
gpu_probation = 0.3
pair_hold = 0.3
pair_probation = 0.3
port_grace = 0.2
port_hold = 0.3
port_probation = 0.3
suspect = 1.0
flap_hold = 1.0
flap_count = 3
merge = 5.0
[[xid]]
code = 31
class = "software"
action = "record"
recurrence = 3
remedy = "the application"
source = "test"
[[xid]]
code = 74
class = "nvlink"
action = "pair"
remedy = "links up"
source = "test"
[[xid]]
code = 79
class = "uncorrectable"
action = "unhealthy"
reset = true
remedy = "reboot"
source = "test"
"""
"""The built-in rules with times for tests."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the fake driver, built once."""
    return build_stub(tmp_path_factory.mktemp("nvml"))


@dataclass
class Node:
    """One machine and what the tests do to it."""

    folder: Path
    fake: FakeNode
    driver: StubDriver
    kubelet: FakeKubelet
    flags: dict[str, str] = field(default_factory=dict)
    agent: Agent | None = None
    task: asyncio.Task[None] | None = None

    @property
    def sysfs(self) -> Path:
        return self.folder / "sys"

    def uuid(self, index: int) -> str:
        return self.fake.gpus[index].uuid

    def value(self, name: str, **labels: str) -> float:
        assert self.agent is not None
        return self.agent.metrics.value(name, **labels)

    async def start(self, **flags: str) -> None:
        self.flags |= flags
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in self.flags.items()]
        # Long enough for loaded machines, where a driver that answers must not count as hung.
        deadlines = Deadlines(facts=60, alive=60, status=60, sysfs=60, ports=60, listen=60, beat=60)
        if self.flags.get("name") == "hangs":
            deadlines = Deadlines(
                facts=8, alive=3, status=30, sysfs=60, ports=60, listen=20, beat=60
            )
        self.agent = Agent(settings_from(arguments, {}), deadlines)
        self.task = asyncio.create_task(self.agent.run())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
        self.task = None

    async def until(self, condition: Any, description: str = "") -> float:
        """Waits; an agent that died reports its reason."""

        def check() -> Any:
            if self.task is not None and self.task.done():
                self.task.result()
            return condition()

        return await self.kubelet.until(check, description=description)

    async def ready(self) -> float:
        return await self.until(
            lambda: (
                len(self.kubelet.plugins) == len(RESOURCES)
                and all(
                    plugin.connected and plugin.messages for plugin in self.kubelet.plugins.values()
                )
            ),
            "all resources registered",
        )

    async def gpus(self, count: int) -> float:
        """Waits until this number of GPUs is allocatable."""
        return await self.until(
            lambda: len(self.kubelet.healthy(GPU)) == count, f"{count} GPUs allocatable"
        )


@pytest.fixture
def machine(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """The paper's node; nothing runs yet."""
    with tempfile.TemporaryDirectory(prefix="fn") as short:
        folder = Path(short)
        fake = paper_node()
        write_sysfs(fake, folder / "sys")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("FLYER_STUB_NVML", str(folder / "driver"))
        driver = StubDriver(folder / "driver", fake)
        driver.write()
        devices = folder / "dev"
        (devices / "infiniband").mkdir(parents=True)
        names = [f"nvidia{index}" for index in range(8)]
        for name in (*names, "nvidiactl", "infiniband/uverbs0", "infiniband/rdma_cm"):
            (devices / name).touch()
        (folder / "policy.toml").write_text(POLICY)
        (folder / "p").mkdir()
        flags = {
            "name": "node-1",
            "plugin_folder": str(folder / "p"),
            "sysfs_root": str(folder / "sys"),
            "device_root": str(devices),
            "cdi_folder": str(folder / "cdi"),
            "cdi_static_folder": str(folder / "etc-cdi"),
            "state_folder": str(folder / "state"),
            "kernel_log": "",
            "policy": str(folder / "policy.toml"),
            "poll": "0.1",
            "metrics_address": "127.0.0.1",
            "metrics_port": "0",
        }
        yield Node(folder, fake, driver, FakeKubelet(folder / "p"), flags)


@pytest.fixture
async def node(machine: Node) -> AsyncIterator[Node]:
    """The paper's node with agent and kubelet running, all resources registered."""
    await machine.kubelet.start()
    await machine.start()
    try:
        await machine.ready()
        yield machine
    finally:
        await machine.stop()
        await machine.kubelet.stop()

"""Random sequences of everything that happens to a node; what must hold, holds after each settles.

Registrations, kubelet restarts, deleted sockets, cut streams, allocations, releases, faults and
recoveries of GPUs and pairs, in any order. Safety at every step: no unhealthy or used device is
allocated, ids never change, no pair is broken needlessly. Liveness at the end: every resource is
registered and advertised.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import grpc
import pytest
from flyer_node.plugin import registrar
from flyer_node.plugin.resources import GPU

from deviceplugin.testing.harness import PluginHarness, plugin_harness

STEPS = 50
REFUSALS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.CANCELLED,
)


class Chaos:
    """One seed's run."""

    def __init__(self, harness: PluginHarness, seed: int) -> None:
        self.harness = harness
        self.kubelet = harness.kubelet
        self.random = random.Random(seed)
        self.bridges = harness.view.inventory.bridges
        self.ids = {gpu.uuid for gpu in harness.view.inventory.gpus}
        self.bad: set[str] = set()
        self.bad_pairs: set[str] = set()
        self.containers = 0

    async def step(self) -> None:
        acts = [
            self.restart,
            self.wipe,
            self.cut,
            self.allocate,
            self.allocate,
            self.allocate,
            self.release,
            self.release,
            self.turn_gpu,
            self.turn_gpu,
            self.turn_pair,
        ]
        await self.random.choice(acts)()

    async def restart(self) -> None:
        await self.kubelet.restart()

    async def wipe(self) -> None:
        for plugin in list(self.kubelet.plugins.values()):
            if self.random.random() < 0.5:
                (self.kubelet.folder / plugin.endpoint).unlink(missing_ok=True)

    async def cut(self) -> None:
        if GPU in self.kubelet.plugins:
            await self.kubelet.cut_stream(GPU)

    async def allocate(self) -> None:
        if not self.kubelet.free(GPU):
            return
        free = set(self.kubelet.free(GPU))
        count = self.random.randint(1, min(4, len(free)))
        self.containers += 1
        name = f"c{self.containers}"
        allocated = set().union(*self.kubelet.allocated.get(GPU, {}).values())
        try:
            response = await self.kubelet.admit(GPU, name, count)
        except grpc.aio.UsageError:
            return  # registered again between the two calls: the kubelet's old channel is closed
        except grpc.aio.AioRpcError as error:
            # The socket was just wiped, or the GPU just went bad: refused.
            if error.code() in REFUSALS:
                return
            raise
        selection = set(response.envs["FLYER_GPUS"].split(","))
        assert len(selection) == count
        assert not selection & allocated, "held already"
        assert not selection & self.bad, "out of service"
        pairs = [b for b in self.bridges if b.id not in self.bad_pairs]
        broken = [
            b
            for b in pairs
            if {b.first, b.second} <= free and len({b.first, b.second} & selection) == 1
        ]
        paired = {
            uuid for b in pairs for uuid in (b.first, b.second) if {b.first, b.second} <= free
        }
        loose = free - paired
        assert len(broken) <= (0 if count % 2 == 0 or loose else 1), "a pair broken needlessly"

    async def release(self) -> None:
        if holders := sorted(self.kubelet.allocated.get(GPU, {})):
            self.kubelet.release(self.random.choice(holders))

    async def turn_gpu(self) -> None:
        self.bad ^= {self.random.choice(sorted(self.ids))}
        await self.publish()

    async def turn_pair(self) -> None:
        self.bad_pairs ^= {self.random.choice(self.bridges).id}
        await self.publish()

    async def publish(self) -> None:
        view = replace(
            self.harness.view, bad_gpus=frozenset(self.bad), bad_pairs=frozenset(self.bad_pairs)
        )
        self.harness.device_lists.publish(view)

    async def settle(self) -> None:
        await self.kubelet.until(
            lambda: self.kubelet.healthy(GPU) == self.ids - self.bad,
            description="all good GPUs offered",
        )
        assert set(self.kubelet.plugins[GPU].devices) == self.ids, "ids never change"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.timeout(300)
async def test_after_any_sequence_all_devices_are_offered(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a cut stream the kubelet lists devices again, or the plugin registers after this time.
    monkeypatch.setattr(registrar, "NO_STREAM_SECONDS", 0.5)
    monkeypatch.setattr(registrar, "NO_STREAM_SECONDS_MAX", 0.5)
    async with plugin_harness() as harness:
        await harness.ready()
        chaos = Chaos(harness, seed)
        for number in range(STEPS):
            await chaos.step()
            if number % 6 == 0:
                await chaos.settle()
            else:
                await asyncio.sleep(0)
        await chaos.settle()
        await harness.ready()

"""Launchers of gangs in tests, behind real sidecars."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from flyer.engine import (
    GangStarted,
)
from flyer.job.client import JobClient

if TYPE_CHECKING:
    from pathlib import Path


class Launcher:
    """A launcher that follows the protocol, without ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def open(self, state: str = "waiting") -> None:
        path = str(self._folder / "launcher.sock")
        async with asyncio.timeout(60):
            while True:
                try:
                    self.reader, self.writer = await asyncio.open_unix_connection(path)
                    break
                except OSError:
                    await asyncio.sleep(0.01)
        await self.send(op="launcher", state=state)

    async def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()

    async def receive(self, kind: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                line = await self.reader.readline()
                assert line, f"the sidecar closed the connection before `{kind}`"
                message = json.loads(line)
                if message["kind"] == kind:
                    return message


async def launcher(harness: Any, name: str, state: str = "waiting") -> Launcher:
    started = Launcher(harness.folder / name)
    await started.open(state)
    return started


async def started(harness: Any, nodes: int = 2, name: str = "gpt") -> tuple[Any, list[Launcher]]:
    """A gang whose launchers run."""
    gang = harness.gang(name, nodes=nodes)
    harness.expect(gang)
    for pod in gang.pods:
        await harness.sidecar(pod.name)
    launchers = [await launcher(harness, pod.name) for pod in gang.pods]
    for launched in launchers:
        await launched.receive("start")
        await launched.send(op="launcher", state="running")
    await harness.event(GangStarted, gang.key)
    return gang, launchers


async def client(harness: Any, name: str, rank: int) -> JobClient:
    path = str(harness.folder / name / "job.sock")
    return await asyncio.to_thread(JobClient, path, rank)

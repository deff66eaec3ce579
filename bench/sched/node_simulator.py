"""Client of the simulated sidecars' process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Self

from bench.report import ROOT
from bench.sched.testbed import TestbedError
from testcluster.processes import STATE_VARIABLE

if TYPE_CHECKING:
    from bench.sched.testbed import Testbed

__all__ = ["NodeSimulator"]


class NodeSimulator:
    """`async with` starts and ends it. Sidecars look for a gateway on both operators' ports."""

    def __init__(self, testbed: Testbed) -> None:
        self.running = 0
        self.suspended: dict[str, float] = {}  # pod → when its sidecar was asked, since the epoch
        self._testbed = testbed
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        ports = [str(self._testbed.state.ports[f"gateway-{number}"]) for number in (0, 1)]
        with self._testbed.state.log("fleet").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.sched.simulated_nodes",
                str(self._testbed.state.kubeconfig), *ports,
                cwd=ROOT, env=os.environ | {STATE_VARIABLE: str(self._testbed.folder)},
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._reader is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._reader.cancel()

    async def send(self, *commands: str) -> None:
        """Send commands, see `bench.sched.simulated_nodes`."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{command}\n" for command in commands).encode())
        await self._process.stdin.drain()

    async def until_running(self, count: int, seconds: float = 120.0) -> None:
        """Wait until this number of sidecars run their ranks."""
        await self._testbed.until(f"{count} sidecars run", lambda: self._is(count), seconds)

    def _is(self, count: int) -> bool:
        if self._process is not None and self._process.returncode is not None:
            raise TestbedError(f"the sidecars' process ended; see {self._testbed.logs}/fleet.log")
        return self.running == count

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            fact = json.loads(line)
            self.running = fact.get("running", self.running)
            if "suspend" in fact:
                self.suspended.setdefault(fact["suspend"], fact["time"])

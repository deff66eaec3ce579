"""Sidecar of a pod: connects its launcher and ranks with the operator's gateway.

It decides nothing. Messages of the pod change the state, which the relay reports; orders of the
gateway change it, too, and are forwarded to the launcher and to the job socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import TYPE_CHECKING

from flyer.job.failure import write_atomically
from flyer.job.protocol import SuspendCode, Welcome
from flyer.job.rendezvous_port import reserve_port
from flyer.job.server import JobServer
from flyer.sidecar.launch import LauncherServer
from flyer.sidecar.relay import Relay
from flyer.sidecar.state import SidecarState
from flyer.sidecar.wire import GivenUp, LauncherState, Order, Saved

if TYPE_CHECKING:
    import socket

    from flyer.sidecar.settings import SidecarSettings
    from flyer.sidecar.wire import StartOrder

__all__ = ["Sidecar"]

JOB_SOCKET = "job.sock"
TOPOLOGY_FILE = "topology.json"
REASON_CHARACTERS_MAX = 1000

log = logging.getLogger(__name__)


class Sidecar:
    """The sidecar of one pod. Create it in its event loop; it runs until cancelled."""

    def __init__(self, settings: SidecarSettings) -> None:
        self._settings = settings
        self.state = SidecarState(settings.run_folder)
        self._launcher = LauncherServer(self.state, settings.run_folder)
        self.relay = Relay(settings, self.state, self.obey)
        self._server: JobServer | None = None
        self._port: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve the pod and keep the stream open."""
        self.state.load()
        if self.state.start is None:
            self._port = reserve_port()
            self.state.update(port=self._port.getsockname()[1])
        try:
            if self.state.start is not None:
                await self._open(self.state.start)
            await self._launcher.start()
            relaying = asyncio.create_task(self.relay.run())
            self._tasks.add(relaying)
            await asyncio.wait([relaying, self._crashed], return_when=asyncio.FIRST_COMPLETED)
            (self._crashed if self._crashed.done() else relaying).result()
        finally:
            await self._launcher.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._server is not None:
                await self._server.close()
            if self._port is not None:
                self._port.close()

    def obey(self, order: Order) -> None:
        """Apply an order of the gateway; a repeated order has no effect."""
        self.state.apply(order)
        if self.state.start is not None and self._server is None:
            task = asyncio.get_running_loop().create_task(self._open(self.state.start))
            self._tasks.add(task)
            task.add_done_callback(self._opened)
            return
        if order.suspend is not None:
            self._signal()
        self._launcher.push()

    async def _open(self, start: StartOrder) -> None:
        """Serve the job socket, then have the launcher start the ranks."""
        if self._server is not None:
            return
        folder = self._settings.run_folder
        write_atomically(folder / TOPOLOGY_FILE, json.dumps(start.topology, indent=1))
        welcome = Welcome(
            job=start.job,
            chain=start.chain,
            attempt=start.attempt,
            user_state=self.state.report.user_state or start.user_state,
            restore_step=start.restore_step,
            restore_path=start.restore_path,
        )
        self._server = JobServer(
            folder / JOB_SOCKET, welcome, self, mode=0o666, greeted=self._greeted
        )
        await self._server.start()
        if start.node_rank != 0 and self._port is not None:
            self._port.close()
            self._port = None
        self._signal()
        self._launcher.push()

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._crashed.done():
            self._crashed.set_exception(error)

    def _signal(self) -> None:
        suspend, report = self.state.suspend, self.state.report
        if suspend is None or self._server is None:
            return
        code = SuspendCode.RECEIVED if report.received else SuspendCode.SENT
        code = SuspendCode.MAY_SUSPEND if report.released else code
        self._server.signal(suspend.seconds_left, suspend.reason, code)
        self.state.update(suspended=True)

    def _greeted(self, _rank: int) -> None:
        if self._server is not None:
            ranks_seen = max(len(self._server.ranks_seen), self.state.report.ranks_seen)
            self.state.update(ranks_seen=ranks_seen)

    # -- requests of ranks (flyer.job.server.JobHandler) -----------------------------------------

    async def received(self, rank: int) -> None:  # noqa: ARG002 - the job speaks through any rank
        """The job acknowledges the suspension."""
        if self.state.suspend is not None:
            self.state.update(received=True)

    async def progress(self, rank: int, step: int, metrics: dict[str, float]) -> None:
        """The job finished a step; the report has the numbers of the lowest rank."""
        old = self.state.report.step
        if old is not None and (step < old or (step == old and rank != 0)):
            return
        self.state.update(step=step, metrics=metrics or self.state.report.metrics)

    async def checkpoint(self, rank: int, step: int, path: str, durable: bool) -> None:  # noqa: ARG002, FBT001
        """The job wrote a checkpoint."""
        saved = Saved(step, path)
        if durable:
            self.state.update(durable=saved)
        else:
            self.state.update(volatile=saved)

    async def release(self, rank: int, step: int | None) -> None:  # noqa: ARG002
        """The job releases all its nodes."""
        self.state.update(released=True)

    async def fail(self, rank: int, reason: str) -> None:
        """The job fails without a restart."""
        own = self.state.own_rank(rank)
        if own is None:
            log.warning("rank %d failed the job before the start order: %s", rank, reason)
            return
        if own != rank:
            reason = f"(reported as rank {rank}) {reason}"
        if self.state.report.given_up is None:
            self.state.update(given_up=GivenUp(own, reason[:REASON_CHARACTERS_MAX]))

    async def user_state(self, rank: int, state: int) -> None:  # noqa: ARG002
        """Store the user's 32-bit state."""
        self.state.update(user_state=state & 0xFFFFFFFF)

    async def finish(self) -> None:
        """Wait until the gateway acknowledges the last report, before kubelet ends the sidecar."""
        if self.state.report.launcher is LauncherState.ABSENT:
            return
        with contextlib.suppress(asyncio.CancelledError):
            if not await self.state.flush(self._settings.flush_seconds):
                log.warning("gateway: the last report was not acknowledged")

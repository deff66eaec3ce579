"""The parent's side of the worker process: every question has a deadline.

A worker that misses one is killed; the next query starts another. Queries to a driver that hung are
refused until its pause is over, so that a driver that always hangs costs one worker per pause and
delays nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyer_node.errors import DataError, HardwareError
from flyer_node.hardware.driver import DriverEvent, GpuProbe, GpuStatus
from flyer_node.hardware.worker import CHANNEL_OF, PULSE_SECONDS
from flyer_node.inventory.assemble import DriverFacts, SysfsFacts
from flyer_node.inventory.hca import PortStatus
from flyer_node.json_codec import from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Deadlines", "Hardware"]

LINE_BYTES_MAX = 4 << 20
"""One answer; an inventory of a large machine is some 30 KB."""
PAUSE_SECONDS_MAX = 30.0
ABANDONED_MAX = 4
"""Workers that even SIGKILL did not end (stuck in the kernel); above it none is started."""
REAP_SECONDS = 2.0
QUICK = frozenset({"status", "probe", "ports"})
"""Questions that an order of `Deadlines.alive` is enough for."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that each kind of question may take before the hardware counts as hung.

    Far above the usual duration of a query (milliseconds): jobs may keep every core of a node busy,
    and a healthy device that is taken for hung leaves service. If the worker reports meanwhile that
    it runs, the node is not busy, and the shorter `alive` applies.
    """

    facts: float = 20.0
    """The driver initialises itself at the first one: seconds on a machine of eight GPUs."""
    alive: float = 3.0
    """Timeout of queries and probes, in seconds in which the worker process ran."""
    status: float = 10.0
    sysfs: float = 10.0
    ports: float = 10.0
    listen: float = 20.0
    beat: float = 15.0
    """Silence of the thread that waits for events."""


@dataclass
class _Pause:
    seconds: float = 0.0
    until: float = 0.0


@dataclass
class _Worker:
    process: asyncio.subprocess.Process
    reader: asyncio.Task[None] | None = None
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    remaining_pulses: dict[int, int] = field(default_factory=dict)
    """Pulses until a call counts as hung, by its id."""
    beat: float | None = None


class Hardware:
    """Asks the worker; starts, kills and replaces it."""

    def __init__(
        self,
        sysfs_root: Path,
        *,
        deadlines: Deadlines | None = None,
        on_event: Callable[[DriverEvent], None] = lambda _: None,
        on_kill: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._root = sysfs_root
        self._deadlines = deadlines or Deadlines()
        self._on_event = on_event
        self._on_kill = on_kill
        self._worker: _Worker | None = None
        self._starting = asyncio.Lock()
        self._next_id = 0
        self._pauses: dict[str, _Pause] = {"driver": _Pause(), "sysfs": _Pause()}
        self._abandoned = 0
        self._reapers: set[asyncio.Task[None]] = set()

    @property
    def listening(self) -> bool:
        """Whether the current worker waits for events and has sent a recent heartbeat."""
        beat = self._worker.beat if self._worker else None
        if beat is None:
            return False
        if time.monotonic() - beat > self._deadlines.beat:
            self._kill("the event thread sent no heartbeat")
            return False
        return True

    async def facts(self) -> DriverFacts:
        """All GPUs as the driver describes them."""
        return from_json(DriverFacts, await self._ask("facts", self._deadlines.facts))

    async def status(self, gpus: Sequence[str]) -> tuple[GpuStatus, ...]:
        """One look at each of these GPUs."""
        answer = await self._ask("status", self._deadlines.status, gpus=list(gpus))
        return from_json(tuple[GpuStatus, ...], answer, "status")

    async def probe(self, gpus: Sequence[str]) -> tuple[GpuProbe, ...]:
        """A closer look at GPUs that are to return."""
        answer = await self._ask("probe", self._deadlines.status, gpus=list(gpus))
        return from_json(tuple[GpuProbe, ...], answer, "probe")

    async def sysfs(self) -> SysfsFacts:
        """All that sysfs shows."""
        return from_json(
            SysfsFacts, await self._ask("sysfs", self._deadlines.sysfs, root=str(self._root))
        )

    async def ports(self) -> tuple[PortStatus, ...]:
        """State and counters of all ports."""
        answer = await self._ask("ports", self._deadlines.ports, root=str(self._root))
        return from_json(tuple[PortStatus, ...], answer, "ports")

    async def listen(self, gpus: Sequence[str]) -> None:
        """Asks for the driver's events; they go to `on_event` until the worker is replaced."""
        await self._ask("listen", self._deadlines.listen, gpus=list(gpus))
        if self._worker:
            self._worker.beat = time.monotonic()

    def renew(self) -> None:
        """Replaces the worker at the next call: a GPU that was reset needs new handles."""
        self._kill(None)

    async def close(self) -> None:
        """Ends the worker."""
        self._kill(None)
        if self._reapers:
            await asyncio.wait(self._reapers, timeout=REAP_SECONDS + 1)

    async def _ask(self, question: str, deadline: float, **details: Any) -> Any:
        pause = self._pauses[CHANNEL_OF[question]]
        remaining = pause.until - time.monotonic()
        if remaining > 0:
            raise HardwareError(
                "hung", question, f"it hung before; next query in {remaining:.1f} s"
            )
        worker = await self._running()
        self._next_id += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        worker.waiting[self._next_id] = answer
        if question in QUICK:
            pulses = max(1, round(self._deadlines.alive / PULSE_SECONDS))
            worker.remaining_pulses[self._next_id] = pulses
        message = {"id": self._next_id, "ask": question, **details}
        try:
            assert worker.process.stdin is not None
            worker.process.stdin.write(json.dumps(message).encode() + b"\n")
            # Not wait_for, which in Python 3.11 may swallow a cancellation.
            async with asyncio.timeout(deadline):
                result = await answer
        except TimeoutError as error:
            waited = str(error) or f"no answer after {deadline:g} s"
            pause.seconds = min(PAUSE_SECONDS_MAX, max(1.0, pause.seconds * 2))
            pause.until = time.monotonic() + pause.seconds
            if worker is self._worker:
                self._kill(f"{question}: {waited}")
            why = f"{waited}; the worker was killed"
            raise HardwareError("hung", question, why) from None
        except (ConnectionError, RuntimeError) as error:
            raise HardwareError("died", question, f"the worker is gone: {error}") from error
        finally:
            worker.waiting.pop(message["id"], None)
            worker.remaining_pulses.pop(message["id"], None)
        pause.seconds = 0.0
        return result

    async def _running(self) -> _Worker:
        async with self._starting:
            if self._worker is not None:
                return self._worker
            if self._abandoned >= ABANDONED_MAX:
                why = f"{self._abandoned} workers hang in the kernel and cannot be killed; reboot"
                raise HardwareError("hung", "start", why)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "flyer_node.hardware.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES_MAX,
            )
            self._worker = _Worker(process)
            self._worker.reader = asyncio.create_task(self._read(self._worker))
            return self._worker

    async def _read(self, worker: _Worker) -> None:
        """Dispatches the worker's messages until it ends."""
        assert worker.process.stdout is not None
        why = "the worker ended"
        try:
            while line := await worker.process.stdout.readline():
                self._handle_message(worker, json.loads(line))
        except (ValueError, DataError) as error:
            why = f"invalid message of the worker: {error}"
        if worker is self._worker:
            self._kill(why)

    def _handle_message(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "id" in message:
            waiting = worker.waiting.pop(message["id"], None)
            if waiting is None or waiting.done():
                return
            if "error" in message:
                waiting.set_exception(HardwareError("refused", "driver", message["error"]))
            else:
                waiting.set_result(message["answer"])
            return
        if "pulse" in message:
            self._pulse(worker)
            return
        if "deaf" in message:
            worker.beat = None
            return
        worker.beat = time.monotonic() if "silent" not in message else float("inf")
        if "event" in message:
            self._on_event(from_json(DriverEvent, message["event"]))

    def _pulse(self, worker: _Worker) -> None:
        """The worker runs, and these questions have no answer yet."""
        for number in worker.remaining_pulses:
            worker.remaining_pulses[number] -= 1
            waiting = worker.waiting.get(number)
            if worker.remaining_pulses[number] <= 0 and waiting is not None and not waiting.done():
                text = f"no answer in {self._deadlines.alive:g} s in which the worker ran"
                waiting.set_exception(TimeoutError(text))

    def _kill(self, why: str | None) -> None:
        """Ends the present worker; `why` is None when nothing is wrong."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if why is not None:
            self._on_kill(why)
        for waiting in worker.waiting.values():
            if not waiting.done():
                waiting.set_exception(HardwareError("died", "worker", why or "closed"))
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()
        task = asyncio.create_task(self._reap(worker))
        self._reapers.add(task)
        task.add_done_callback(self._reapers.discard)

    async def _reap(self, worker: _Worker) -> None:
        try:
            async with asyncio.timeout(REAP_SECONDS):
                await worker.process.wait()
        except TimeoutError:
            self._abandoned += 1
            await worker.process.wait()
            self._abandoned -= 1
        if worker.reader is not None and worker.reader is not asyncio.current_task():
            worker.reader.cancel()

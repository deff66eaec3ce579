"""Fork server: starts pods fast by forking them from a process that has imported their modules.

This is the driver's side, in asyncio; `flyer.job.fork_server_process` is the server. No process
outlives its parent: the fork server dies with its driver, pods with the fork server, ranks with
their launcher.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from flyer.job.failure import Failure, read_failure
from flyer.job.pod import THREAD_COUNT_NAMES, PodSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ForkServer", "ForkServerError", "PodExit", "PodProcess"]

START_SECONDS_MAX = 120.0  # a cold import of torch from a slow disk takes tens of seconds
SPAWN_SECONDS_MAX = 20.0
CLOSE_SECONDS_MAX = 5.0
LAUNCHER_SECONDS_MAX = 1.0
EVENT_BYTES_MAX = 1024 * 1024

_log = logging.getLogger(__name__)


class ForkServerError(Exception):
    """The fork server failed or has exited; the message names the pod and the cause."""


@dataclass(frozen=True, slots=True)
class PodExit:
    """How a pod ended: as its first failing rank did, or 0, or 104 (suspended)."""

    exit_status: int | None = None
    signal: int | None = None


class PodProcess:
    """A running pod. `wait()` may be called any number of times."""

    def __init__(self, fork_server: ForkServer, number: int, spec: PodSpec, pid: int) -> None:
        self._fork_server = fork_server
        self._number = number
        self.spec = spec
        self.pid = pid
        """Process id of the launcher, which leads the pod's process group and session."""
        self._exited: asyncio.Future[PodExit] = asyncio.get_running_loop().create_future()

    @property
    def exit(self) -> PodExit | None:
        """The pod's exit, or None while it runs."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> PodExit:
        """Wait until all its processes have ended. Has no timeout: use `asyncio.timeout`."""
        return await asyncio.shield(self._exited)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Signal the pod, if it still runs.

        SIGTERM and SIGINT go to the launcher, which forwards them to its ranks; other signals go
        to every process of the pod. SIGKILL also reaches processes that left its group.
        """
        if not self._exited.done():
            self._fork_server._send(
                {"op": "kill", "pod": self._number, "signal": int(signal_number)}
            )

    def failure(self) -> Failure | None:
        """The first failing rank, once the pod has ended."""
        return read_failure(self.spec.run_dir)


class ForkServer:
    """One preloaded parent process. `start()` creates it; `close()` kills it and every pod."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pods: dict[int, PodProcess] = {}
        self._spawning: dict[int, tuple[PodSpec, asyncio.Future[PodProcess]]] = {}
        self._numbers = 0
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._lost = asyncio.Event()
        self._closing = False
        self.preload_problems: list[str] = []
        """Modules that could not be preloaded: pods import them at their start."""

    @classmethod
    async def start(
        cls,
        preload: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        timeout_seconds: float = START_SECONDS_MAX,
    ) -> ForkServer:
        """Start the parent process and wait until it has imported the modules of `preload`.

        `log` receives the output of those imports; default: this process' standard error. The
        calling thread must outlive the fork server.
        """
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with child_end:
            environment = dict(os.environ if env is None else env)
            for name in THREAD_COUNT_NAMES:
                environment.setdefault(name, "1")
            code = "from flyer.job.fork_server_process import main; main()"
            arguments = [str(child_end.fileno()), str(os.getpid()), ",".join(preload)]
            # A separate session: only the driver receives a Ctrl-C of the terminal.
            process = subprocess.Popen(  # noqa: ASYNC220  microseconds, and no watcher thread
                [sys.executable, "-c", code, *arguments],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log or sys.stderr,
                stderr=log or sys.stderr,
                env=environment,
                start_new_session=True,
            )
        fork_server = cls(process, parent_end)
        try:
            await fork_server._open(timeout_seconds)
        except BaseException:
            process.kill()  # no pod exists yet
            await fork_server.close()
            raise
        return fork_server

    async def _open(self, timeout_seconds: float) -> None:
        self._control.setblocking(False)
        reader, self._writer = await asyncio.open_connection(
            sock=self._control, limit=EVENT_BYTES_MAX
        )
        self._reader = asyncio.get_running_loop().create_task(self._read(reader))
        try:
            async with asyncio.timeout(timeout_seconds):
                event = await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise ForkServerError(
                f"the fork server was not ready after {timeout_seconds:g} s of preloading"
            ) from error
        self.preload_problems = [str(problem) for problem in event.get("problems", [])]
        for problem in self.preload_problems:
            _log.warning("preload: %s", problem)

    @property
    def pid(self) -> int:
        """The parent process."""
        return self._process.pid

    @property
    def lost(self) -> asyncio.Event:
        """Set once the fork server and every pod have ended."""
        return self._lost

    async def spawn(self, spec: PodSpec, timeout_seconds: float = SPAWN_SECONDS_MAX) -> PodProcess:
        """Start a pod and create its folders. Returns when its process group exists."""
        if self._closing:
            raise ForkServerError(
                f"pod {spec.job}@{spec.node}: the fork server has exited; start another"
            )
        self._numbers += 1
        number = self._numbers
        started: asyncio.Future[PodProcess] = asyncio.get_running_loop().create_future()
        self._spawning[number] = (spec, started)
        self._send({"op": "spawn", "pod": number, "spec": spec.to_json()})
        try:
            async with asyncio.timeout(timeout_seconds):
                return await started
        except TimeoutError as error:
            self._send({"op": "kill", "pod": number, "signal": int(signal.SIGKILL)})
            raise ForkServerError(
                f"pod {spec.job}@{spec.node} did not start within {timeout_seconds:g} s"
            ) from error
        finally:
            self._spawning.pop(number, None)

    async def close(self, timeout_seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Kill every pod and the fork server; returns when they have ended."""
        if self._reader is None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._lost.set()
            return
        self._hang_up()
        await asyncio.wait([self._reader], timeout=2 * timeout_seconds)

    def _hang_up(self) -> None:
        self._closing = True
        if self._writer is not None:
            self._writer.close()  # at EOF the fork server kills its pods and exits

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._closing:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                try:
                    self._take(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    _log.warning("fork server: invalid event %r: %s", line[:200], error)
        except (ConnectionError, ValueError) as error:
            _log.warning("fork server: connection lost: %s", error)
        await self._end()

    def _take(self, event: dict[str, Any]) -> None:
        kind, number = event["event"], event.get("pod", 0)
        if kind == "ready" and not self._ready.done():
            self._ready.set_result(event)
        elif kind == "spawned" and number in self._spawning:
            spec, started = self._spawning.pop(number)
            pod = self._pods[number] = PodProcess(self, number, spec, int(event["pid"]))
            if not started.done():
                started.set_result(pod)
        elif kind == "exited" and number in self._pods:
            pod = self._pods.pop(number)
            pod._exited.set_result(PodExit(event.get("exit_status"), event.get("signal")))
        elif kind == "error":
            self._take_error(number, str(event.get("message")))

    def _take_error(self, number: int, message: str) -> None:
        if number not in self._spawning:
            _log.warning("fork server: %s", message)
            return
        spec, started = self._spawning.pop(number)
        if not started.done():
            started.set_exception(ForkServerError(f"pod {spec.job}@{spec.node}: {message}"))

    async def _end(self) -> None:
        """Ensure that the fork server and its pods end after it closed its connection."""
        self._hang_up()
        if not await _until(lambda: self._process.poll() is not None, CLOSE_SECONDS_MAX):
            self._process.kill()
        self._process.wait()
        # Launchers detect it and kill their ranks; only a stopped launcher must be killed.
        if not await _until(self._groups_are_gone, LAUNCHER_SECONDS_MAX):
            for pod in self._pods.values():
                _signal_session(pod.pid, signal.SIGKILL)
            await _until(self._groups_are_gone, CLOSE_SECONDS_MAX)
        error = ForkServerError(f"the fork server ended with status {self._process.returncode}")
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # mark it as retrieved: `start` may not be waiting
        for _, started in self._spawning.values():
            if not started.done():
                started.set_exception(error)
        for pod in self._pods.values():
            pod._exited.set_result(PodExit(signal=int(signal.SIGKILL)))
        self._pods.clear()
        self._lost.set()

    def _groups_are_gone(self) -> bool:
        return not any(_signal_session(pod.pid, 0) for pod in self._pods.values())


async def _until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll: these processes are not children of this one, and waiting would need a thread."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    while not condition():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


def _signal_session(leader_pid: int, signal_number: int) -> bool:
    """Signal a process group, if it still exists."""
    try:
        os.killpg(leader_pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True

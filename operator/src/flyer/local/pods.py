"""Pods as process groups of this machine: starts and stops gangs, and reports their exits.

The driver receives engine events: PodExited or NodeLost for the end of a pod, then NodeEmptied
after a check that no process of the pod remains. One task per pod watches it from start to end, so
each event is reported exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from flyer.engine import (
    Event,
    Failed,
    Killed,
    NodeEmptied,
    NodeLost,
    Outcome,
    PodExited,
    Succeeded,
)
from flyer.job.failure import Failure, first
from flyer.job.fork_server import ForkServer, ForkServerError, PodExit, PodProcess
from flyer.job.pod import EXIT_PEER_LOST, EXIT_SUSPENDED, PodSpec
from flyer.job.processes import descendant_pids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Pod", "Pods"]

# A killed process ends in milliseconds; a longer time means a process that cannot die (disk wait).
EMPTY_WARN_SECONDS: Final = 10.0
EMPTY_POLL_SECONDS: Final = 0.02
# Longer than a launcher's time to end its other ranks after one failed.
PEER_LOST_SECONDS: Final = 3.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pod:
    """One node's part of a running gang."""

    job: str
    attempt: int
    node: str
    spec: PodSpec
    process: PodProcess
    # Set when the driver ends the pod: its exit is then no evidence about the node.
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    kill_timer: asyncio.TimerHandle | None = None

    def pids(self) -> list[int]:
        """The supervisor and its descendants."""
        return [self.process.pid, *descendant_pids(self.process.pid)]


class Pods:
    """All pods of one driver."""

    def __init__(
        self,
        report: Callable[[Event], None],
        failed: Callable[[str, int, Failure], None],
        crashed: Callable[[BaseException], None],
        *,
        preload: Sequence[str],
        marker: dict[str, str],
        stop_pause_seconds: float,
        log_path: Path,
    ) -> None:
        self._report = report
        self._failed = failed
        self._crashed = crashed
        self._preload = list(preload)
        self._marker = marker
        self._stop_pause_seconds = stop_pause_seconds
        self._log_path = log_path
        self._fork_server: asyncio.Task[ForkServer] | None = None
        self._pods: dict[str, Pod] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._failures: dict[tuple[str, int], list[Failure]] = {}
        self._closing = False

    def open(self) -> None:
        """Start preloading, so that the first gang does not wait for imports."""
        self._fork_server = asyncio.create_task(self._start_fork_server())

    async def close(self) -> None:
        """Kill all pods; returns when no process remains."""
        self._closing = True
        for pod in self._pods.values():
            pod.stopping.set()
        if self._fork_server is not None:
            self._fork_server.cancel()  # no effect once it has started
            with contextlib.suppress(ForkServerError, OSError, asyncio.CancelledError):
                await (await self._fork_server).close()
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=EMPTY_WARN_SECONDS)
        for task in self._watchers:
            task.cancel()

    def on_node(self, node: str) -> Pod | None:
        """The pod that runs there, if any."""
        return self._pods.get(node)

    def of_attempt(self, job: str, attempt: int) -> list[Pod]:
        """The running pods of one attempt, unordered."""
        return [pod for pod in self._pods.values() if (pod.job, pod.attempt) == (job, attempt)]

    async def start_gang(self, job: str, attempt: int, specs: Sequence[PodSpec]) -> None:
        """Start one pod per node concurrently. Returns or raises when every start is decided."""
        for key in [key for key in self._failures if key[0] == job]:
            del self._failures[key]  # of earlier attempts
        fork_server = await self._ready_fork_server()
        started = await asyncio.gather(
            *(self._start(fork_server, job, attempt, spec) for spec in specs),
            return_exceptions=True,
        )
        for error in started:
            if error is not None:
                raise error

    def stop(self, job: str, attempt: int, nodes: Sequence[str], *, kill: bool) -> None:
        """End pods immediately or with SIGTERM first. Nodes without such a pod are empty."""
        for node in nodes:
            pod = self._pods.get(node)
            if pod is None or pod.job != job or pod.attempt > attempt:
                self._report(NodeEmptied(node, job, attempt))
                continue
            pod.stopping.set()
            if kill:
                pod.process.kill(signal.SIGKILL)
            elif pod.kill_timer is None:
                pod.process.kill(signal.SIGTERM)
                pod.kill_timer = asyncio.get_running_loop().call_later(
                    self._stop_pause_seconds, pod.process.kill, signal.SIGKILL
                )

    def terminate(self, job: str, attempt: int) -> None:
        """SIGTERM as the fallback signal, for ranks that never opened their socket."""
        for pod in self.of_attempt(job, attempt):
            pod.process.kill(signal.SIGTERM)

    # -- the fork server -----------------------------------------------------------------------

    async def _start_fork_server(self) -> ForkServer:
        environment = {**os.environ, **self._marker}
        with self._log_path.open("ab") as output:
            return await ForkServer.start(self._preload, env=environment, log=output)

    async def _ready_fork_server(self) -> ForkServer:
        """The running fork server; after a failure the next call starts another one."""
        if self._fork_server is None or _is_gone(self._fork_server):
            self._fork_server = asyncio.create_task(self._start_fork_server())
        return await asyncio.shield(self._fork_server)

    # -- one pod -------------------------------------------------------------------------------

    async def _start(self, fork_server: ForkServer, job: str, attempt: int, spec: PodSpec) -> None:
        process = await fork_server.spawn(spec)
        pod = Pod(job, attempt, spec.node, spec, process)
        self._pods[spec.node] = pod
        watcher = asyncio.create_task(self._watch(pod, fork_server))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watched)

    def _watched(self, watcher: asyncio.Task[None]) -> None:
        self._watchers.discard(watcher)
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._crashed(error)

    async def _watch(self, pod: Pod, fork_server: ForkServer) -> None:
        ended = await pod.process.wait()
        failure = pod.process.failure()
        if pod.kill_timer is not None:
            pod.kill_timer.cancel()
        if ended.exit_status == EXIT_PEER_LOST:
            # The exit of another pod caused this one: let it be reported first.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pod.stopping.wait(), PEER_LOST_SECONDS)
        if failure is not None and not pod.stopping.is_set():
            self._blame(pod, failure)
        if not self._closing:
            self._report(_fact(pod, ended, failure, fork_server_lost=fork_server.lost.is_set()))
        await _until_group_is_gone(pod)
        if self._pods.get(pod.node) is pod:
            del self._pods[pod.node]
        if not self._closing:
            self._report(NodeEmptied(pod.node, pod.job, pod.attempt))

    def _blame(self, pod: Pod, failure: Failure) -> None:
        failures = self._failures.setdefault((pod.job, pod.attempt), [])
        failures.append(failure)
        guilty = first(failures)
        if guilty is not None:
            self._failed(pod.job, pod.attempt, guilty)


def _is_gone(fork_server: asyncio.Task[ForkServer]) -> bool:
    if not fork_server.done():
        return False
    return (
        fork_server.cancelled()
        or fork_server.exception() is not None
        or fork_server.result().lost.is_set()
    )


def _fact(pod: Pod, ended: PodExit, failure: Failure | None, *, fork_server_lost: bool) -> Event:
    """The engine event for the end of a pod."""
    died = ended.signal is not None and failure is None
    if died and not pod.stopping.is_set() and not fork_server_lost:
        name = _signal_name(ended.signal or 0)
        evidence = f"its supervisor, process {pod.process.pid}, was killed by {name}"
        return NodeLost(pod.node, "ProcessesKilled", evidence)
    return PodExited(pod.job, pod.attempt, pod.node, _outcome(ended, failure))


def _outcome(ended: PodExit, failure: Failure | None) -> Outcome:
    if ended.exit_status == 0:
        return Succeeded()
    if ended.exit_status == EXIT_SUSPENDED:
        return Killed(0, "it released its node")
    if ended.exit_status == EXIT_PEER_LOST:
        if failure is not None and failure.traceback:
            return Killed(0, f"it lost its peers: {_last_line(failure)}")
        return Killed(0, "it lost its peers, and none reports a cause")
    if ended.signal is not None:
        rank = f"rank {failure.rank}: " if failure else ""
        return Killed(ended.signal, f"{rank}killed by {_signal_name(ended.signal)}")
    return Failed(ended.exit_status or 1, _last_line(failure))


def _last_line(failure: Failure | None) -> str:
    if failure is None:
        return ""
    lines = (failure.traceback or "").strip().splitlines()
    words = lines[-1] if lines else failure.outcome
    return f"rank {failure.rank}: {words}"[:300]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _until_group_is_gone(pod: Pod) -> None:
    """Kill the remaining processes of the pod's group and wait until none is left."""
    loop = asyncio.get_running_loop()
    warn_at = loop.time() + EMPTY_WARN_SECONDS
    while _group_exists(pod.process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pod.process.pid, signal.SIGKILL)
        if loop.time() > warn_at:
            log.warning("node %s: processes of %s do not die", pod.node, pod.job)
            warn_at += EMPTY_WARN_SECONDS
        await asyncio.sleep(EMPTY_POLL_SECONDS)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the number now belongs to another process group
    return True

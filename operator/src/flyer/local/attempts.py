"""Attempts of jobs on this machine: folders, socket, topology file and pods of each.

logs/<job>/attempt-N/rank-NNNN.log     raw output
logs/<job>/attempt-N/topology.json     FLYER_TOPOLOGY
logs/<job>/attempt-N/hfreduce.key      HFREDUCE_KEY_FILE, mode 0600
logs/<job>/attempt-N/nodes/<node>/     failure.json and the launcher's own log
run/<id>-N.sock                        FLYER_SOCKET
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final

from flyer.engine import (
    Event,
    Failed,
    GangStarted,
    Killed,
    PodExited,
    SuspendReceived,
    topology_document,
)
from flyer.job.fork_server import ForkServerError
from flyer.job.key_file import KEY_FILE, write_private
from flyer.job.pod import PodSpecError
from flyer.job.rendezvous_port import reserve_port
from flyer.local.gateway import Gateway
from flyer.local.pod_specs import LOCAL_ADDRESS, pod_specs

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from flyer.api import FlyerJob
    from flyer.engine import Signal, Start, Stop
    from flyer.local.pods import Pods
    from flyer.local.state_directory import StatePaths
    from flyer.views import ProgressView

__all__ = ["Attempt", "Attempts"]

KEY_BYTES: Final = 32
# BSD's EX_CANTCREAT: the pods could not be created; the user's program did not run.
EXIT_NOT_STARTED: Final = 73

# Shortest interval of reports of log output to the progress deadline.
LOG_INTERVAL_SECONDS: Final = 2.0

log = logging.getLogger(__name__)


class Attempt:
    """One attempt, from its start until its last node is empty."""

    def __init__(
        self,
        job: FlyerJob,
        start: Start,
        paths: StatePaths,
        report: Callable[[Event], None],
        show: Callable[[], None],
    ) -> None:
        self.job = job
        self.start = start
        self._port: socket.socket | None = None
        self.folder = paths.job_logs(start.job) / f"attempt-{start.attempt}"
        digest = hashlib.sha256(start.job.encode()).hexdigest()[:8]
        self.gateway = Gateway(
            job, start, paths.run / f"{digest}-{start.attempt}.sock", report, show
        )
        self.starting: asyncio.Task[None] | None = None
        progress_deadline = job.spec.progress_deadline
        self._log_interval_seconds = LOG_INTERVAL_SECONDS
        if progress_deadline is not None:
            self._log_interval_seconds = min(LOG_INTERVAL_SECONDS, progress_deadline.seconds / 4)
        self._log_bytes = 0
        self._log_reported_at = 0.0

    def reserve_port(self) -> int:
        """The port for rank 0, held until `close`: another `flyer` may start a job meanwhile."""
        self._port = reserve_port()
        return int(self._port.getsockname()[1])

    async def close(self) -> None:
        """Release the port and close the socket of the job."""
        if self._port is not None:
            self._port.close()
        await self.gateway.close()

    @property
    def progress(self) -> ProgressView | None:
        """The ranks' latest reports."""
        return self.gateway.progress_view

    def log_grew(self, now: float) -> bool:
        """Whether a rank wrote output since the last call that returned true; rate-limited."""
        if now < self._log_reported_at + self._log_interval_seconds:
            return False
        total = 0
        for path in self.folder.glob("rank-*.log"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        grew = total > self._log_bytes
        if grew:
            self._log_bytes, self._log_reported_at = total, now
        return grew


class Attempts:
    """The running attempts, at most one per job."""

    def __init__(
        self,
        paths: StatePaths,
        pods: Pods,
        report: Callable[[Event], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._paths = paths
        self._pods = pods
        self._report = report
        self._crashed = crashed
        self._attempts: dict[str, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, job: str) -> Attempt | None:
        """The running attempt of a job."""
        return self._attempts.get(job)

    def running(self) -> list[Attempt]:
        """All running attempts."""
        return list(self._attempts.values())

    def start(self, job: FlyerJob, start: Start, show: Callable[[], None]) -> None:
        """Start an attempt; GangStarted or PodExited follows."""
        existing = self._attempts.get(start.job)
        if existing is not None and existing.start.attempt == start.attempt:
            return
        attempt = Attempt(job, start, self._paths, self._report, show)
        self._attempts[start.job] = attempt
        if existing is not None:
            self._spawn(existing.close())
        attempt.starting = self._spawn(self._start(attempt))

    def signal(self, signal: Signal) -> None:
        """Ask the ranks to suspend; by SIGTERM if no rank has opened its socket."""
        attempt = self._attempts.get(signal.job)
        if attempt is None or attempt.start.attempt != signal.attempt:
            return
        if not attempt.gateway.signal(signal.deadline, f"{signal.reason} by {signal.by}"):
            self._pods.terminate(signal.job, signal.attempt)
            self._report(SuspendReceived(signal.job, signal.attempt))

    def stop(self, stop: Stop) -> None:
        """End pods; NodeEmptied follows for each node."""
        self._spawn(self._stop(stop))

    def emptied(self, job: str, attempt: int) -> None:
        """Record an empty node; the last one ends the attempt."""
        current = self._attempts.get(job)
        if (
            current is None
            or current.start.attempt != attempt
            or self._pods.of_attempt(job, attempt)
        ):
            return
        if current.starting is not None and not current.starting.done():
            return
        del self._attempts[job]
        self._spawn(current.close())

    async def close(self) -> None:
        """Close the sockets of all attempts."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(value.close() for value in self._attempts.values()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_start_done)
        return task

    def _on_start_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed(error)

    async def _start(self, attempt: Attempt) -> None:
        start = attempt.start
        try:
            attempt.folder.mkdir(parents=True, exist_ok=True)
            topology = attempt.folder / "topology.json"
            topology.write_text(json.dumps(self._topology(attempt), indent=1))
            key = attempt.folder / KEY_FILE
            write_private(key, secrets.token_hex(KEY_BYTES))
            master_port = attempt.reserve_port()
            await attempt.gateway.start()
            specs = pod_specs(
                attempt.job,
                start,
                topology=topology,
                key=key,
                socket_path=attempt.gateway.path,
                logs=attempt.folder,
                run=attempt.folder / "nodes",
                master_port=master_port,
            )
            await self._pods.start_gang(start.job, start.attempt, specs)
        except (OSError, ForkServerError, PodSpecError) as error:
            log.warning("%s: attempt %d does not start: %s", start.job, start.attempt, error)
            reason = f"the pods could not be started: {error}"
            # A wrong manifest fails for good; a full disk or a dead fork server may be transient.
            is_user_error = isinstance(error, FileNotFoundError | PodSpecError)
            outcome = Failed(EXIT_NOT_STARTED, reason) if is_user_error else Killed(0, reason)
            node = start.assignment.names[0]
            self._report(PodExited(start.job, start.attempt, node, outcome))
        else:
            self._report(GangStarted(start.job, start.attempt))

    async def _stop(self, stop: Stop) -> None:
        attempt = self._attempts.get(stop.job)
        if attempt is not None and attempt.starting is not None:
            await asyncio.wait([attempt.starting])  # bounded by the deadlines of the start
        self._pods.stop(stop.job, stop.attempt, stop.nodes, kill=stop.kill)

    def _topology(self, attempt: Attempt) -> dict[str, object]:
        start, job = attempt.start, attempt.job
        return topology_document(
            job=start.job,
            chain=job.status.history.id if job.status else "",
            attempt=start.attempt,
            ranks_per_node=job.spec.ranks_per_node,
            assignment=start.assignment,
            addresses=dict.fromkeys(start.assignment.names, LOCAL_ADDRESS),
        )

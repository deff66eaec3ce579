"""Handle of the job for its own script: `flyer.job.current()`.

Without a job socket no suspension is requested and reports are dropped, so that the same script
runs under plain torchrun. A bare SIGTERM also counts as a suspension. A report never raises:
failed deliveries are retried in the background or logged once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from flyer.job.client import JobClient, JobSocketError
from flyer.job.pod import EXIT_SUSPENDED
from flyer.job.protocol import SuspendCode, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Job", "current"]

RECONNECT_SECONDS = 0.5
PROGRESS_SECONDS = 0.2  # shortest interval of progress reports; only the newest step is sent
SIGTERM_GRACE_SECONDS = 30.0  # after a bare SIGTERM without a deadline from the server
REPORT_SECONDS_MAX = 20.0  # time limit for retries of a report that must arrive
RELEASE_SECONDS_MAX = 10.0  # a released rank that is not stopped exits after this time

_log = logging.getLogger(__name__)


class Job:
    """This rank's view of its job. Get it from `current()`; thread-safe."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.name = environment.get("FLYER_JOB", "")
        self.chain = environment.get("FLYER_CHAIN", "")
        self.attempt = int(environment.get("FLYER_ATTEMPT") or 1)
        self.zone = environment.get("FLYER_ZONE", "")
        self.rank = int(environment.get("RANK") or 0)
        self.world_size = int(environment.get("WORLD_SIZE") or 1)
        self._node_rank = int(environment.get("GROUP_RANK") or 0)
        self._socket_path = environment.get("FLYER_SOCKET")
        self._lock = threading.Lock()
        self._suspended = threading.Event()
        self._closed = threading.Event()
        self._deadline: float | None = None
        self._reason = ""
        self._releasing = False
        self._terminated = threading.Event()  # by SIGTERM
        self._greeted = threading.Event()
        self._welcome: Welcome | None = None
        self._user_state = 0
        self._step_newest: tuple[int, dict[str, float]] | None = None
        self._progress_due = threading.Event()
        self._warned: set[str] = set()

    # -- requests of the scheduler -----------------------------------------------------------

    def suspend_requested(self) -> bool:
        """Whether the scheduler requested a suspension, or a SIGTERM arrived.

        Ranks see the change at different times: let rank 0 decide and broadcast the decision in a
        collective, so that all stop after the same step.
        """
        return self._suspended.is_set()

    @property
    def deadline(self) -> float | None:
        """When this process is killed, in `time.monotonic()`; None without a suspension."""
        with self._lock:
            return self._deadline

    @property
    def reason(self) -> str:
        """The scheduler's reason for the suspension."""
        with self._lock:
            return self._reason

    @property
    def node_rank(self) -> int:
        """Index of this node in the gang."""
        return self._node_rank

    @property
    def restore_path(self) -> str | None:
        """Path of the newest durable checkpoint that was reported; None in the first attempt."""
        welcome = self._wait_welcome()
        return welcome.restore_path if welcome else None

    @property
    def restore_step(self) -> int | None:
        """The step of `restore_path`."""
        welcome = self._wait_welcome()
        return welcome.restore_step if welcome else None

    @property
    def user_state(self) -> int:
        """The user's 32-bit state, kept over all attempts; initially 0."""
        self._wait_welcome()
        with self._lock:
            return self._user_state

    @user_state.setter
    def user_state(self, state: int) -> None:
        if not -(2**31) <= state < 2**32:
            raise ValueError(f"user_state {state} does not fit 32 bits")
        with self._lock:
            self._user_state = state
        self._report("user_state", lambda client: client.user_state(state))

    # -- reports to the scheduler -----------------------------------------------------------

    def received(self) -> bool:
        """Acknowledge the suspension. Returns whether the report arrived."""
        return self._report("received", lambda client: client.received())

    def progress(self, step: int, **metrics: float) -> None:
        """Report a finished step. Never blocks; of frequent calls the newest is sent."""
        with self._lock:
            self._step_newest = (step, {name: float(value) for name, value in metrics.items()})
        self._progress_due.set()

    def checkpoint(self, step: int, path: str, *, durable: bool) -> bool:
        """Report a checkpoint; `durable` means that it survives the loss of this node."""
        return self._report(
            "checkpoint", lambda client: client.checkpoint(step, path, durable=durable)
        )

    def release(self, step: int | None = None) -> NoReturn:
        """Release all nodes of the job now and end this process. Never returns.

        The first call releases the nodes of all ranks: call it when the checkpoint of every rank
        is durable. Exits with status 104, which means suspended.
        """
        with self._lock:
            self._releasing = True
        self._report("release", lambda client: client.release(step))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if self._socket_path is not None:
            # Peers may still be in their last collective: stay until the node is stopped.
            self._terminated.wait(RELEASE_SECONDS_MAX)
        os._exit(EXIT_SUSPENDED)

    def fail(self, reason: str) -> bool:
        """Fail the job without a restart. The caller ends the process."""
        return self._report("fail", lambda client: client.fail(reason))

    # -- the two threads ---------------------------------------------------------------------

    def _start(self) -> None:
        if threading.current_thread() is threading.main_thread() and not _is_helper():
            self._catch_sigterm()
        if self._socket_path is None:
            self._greeted.set()
            return
        atexit.register(self._flush_progress)
        for target, name in ((self._watch, "flyer-watch"), (self._send_progress, "flyer-progress")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def _catch_sigterm(self) -> None:
        previous = signal.getsignal(signal.SIGTERM)

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if self._releasing:
                os._exit(EXIT_SUSPENDED)
            # The main thread waits for neither event before it releases, so it holds no lock here.
            if self._deadline is None:
                self._deadline = time.monotonic() + SIGTERM_GRACE_SECONDS
                self._reason = "SIGTERM"
            self._terminated.set()
            self._suspended.set()
            if callable(previous):
                previous(number, frame)

        signal.signal(signal.SIGTERM, on_sigterm)
        # A worker process of the script is not a rank: SIGTERM ends it by default.
        os.register_at_fork(after_in_child=lambda: _forget(previous))

    def _watch(self) -> None:
        path = self._socket_path or ""
        while not self._closed.is_set():
            try:
                with JobClient(path, self.rank) as client:
                    self._greet(client.welcome)
                    revision = 0
                    while not self._closed.is_set():
                        change = client.watch(revision)
                        revision = change.revision
                        self._take(change.suspend_code, change.seconds_left, change.reason)
            except JobSocketError as error:
                self._warn_once("watch", error)
            self._greeted.set()  # stop waiting for an absent server
            self._closed.wait(RECONNECT_SECONDS)

    def _greet(self, welcome: Welcome) -> None:
        with self._lock:
            if self._welcome is None:
                self._user_state = welcome.user_state
            self._welcome = welcome
        self._warned.discard("watch")
        self._greeted.set()

    def _take(self, code: SuspendCode, seconds_left: float | None, reason: str) -> None:
        if code is SuspendCode.NONE:
            return
        with self._lock:
            if seconds_left is not None:
                self._deadline = time.monotonic() + seconds_left
            self._reason = reason
        self._suspended.set()

    def _wait_welcome(self) -> Welcome | None:
        self._greeted.wait(REPORT_SECONDS_MAX)
        with self._lock:
            return self._welcome

    def _send_progress(self) -> None:
        client: JobClient | None = None
        while not self._closed.is_set():
            self._progress_due.wait()
            self._progress_due.clear()
            with self._lock:
                newest, self._step_newest = self._step_newest, None
            if newest is None:
                continue
            try:
                if client is None:
                    client = JobClient(self._socket_path or "", self.rank)
                client.progress(*newest)
            except JobSocketError as error:
                self._warn_once("progress", error)
                if client is not None:
                    client.close()
                client = None
            self._closed.wait(PROGRESS_SECONDS)

    def _flush_progress(self) -> None:
        """Report the newest step at exit, if it was not reported yet."""
        with self._lock:
            newest, self._step_newest = self._step_newest, None
        if newest is not None and self._socket_path is not None:
            with (
                contextlib.suppress(JobSocketError),
                JobClient(self._socket_path, self.rank, timeout_seconds=1.0) as client,
            ):
                client.progress(*newest)

    def _report(self, operation: str, send: Callable[[JobClient], None]) -> bool:
        """Deliver over a separate connection, with retries for a bounded time."""
        if self._socket_path is None:
            return False
        give_up_at = time.monotonic() + REPORT_SECONDS_MAX
        while True:
            try:
                with JobClient(self._socket_path, self.rank) as client:
                    send(client)
            except JobSocketError as error:
                if error.final or time.monotonic() + RECONNECT_SECONDS > give_up_at:
                    self._warn_once(operation, error)
                    return False
            else:
                return True
            time.sleep(RECONNECT_SECONDS)

    def _warn_once(self, operation: str, error: Exception) -> None:
        if operation not in self._warned:
            self._warned.add(operation)
            _log.warning("the job continues without its job socket: %s", error)


_current: Job | None = None
_current_lock = threading.Lock()


def current() -> Job:
    """The job of this rank. The first call must be in the main thread (for SIGTERM)."""
    global _current  # noqa: PLW0603  the process is one rank of one job
    with _current_lock:
        if _current is None:
            _current = Job(dict(os.environ))
            _current._start()
        return _current


def _is_helper() -> bool:
    """Whether this process is a worker of the script, whose pool ends it with SIGTERM."""
    module: Any = sys.modules.get("multiprocessing.process")
    if module is None:
        return False
    # A spawned worker runs the script before its parent is set, but after its name is set.
    return bool(module.parent_process()) or module.current_process().name != "MainProcess"


def _forget(sigterm_handler: signal.Handlers | Callable[..., object] | int | None) -> None:
    """Reset a forked child, which has no threads and no connection."""
    global _current, _current_lock  # noqa: PLW0603  the child's own
    _current = None
    _current_lock = threading.Lock()
    if sigterm_handler is not None:
        with contextlib.suppress(ValueError):  # forked from another thread: handlers stay
            signal.signal(signal.SIGTERM, sigterm_handler)

"""Launcher of one node: forks the ranks, waits for them, exits like the first failing rank.

The launcher leads the pod's session and process group. It stays single-threaded, collects each
rank's raw output in a file, forwards SIGTERM, kills ranks that do not end in time, adopts and kills
their orphans, and writes `failure.json`. It runs under a fork server or standalone, as in a
container: `python -m flyer.job.launcher POD.json`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flyer.job import processes
from flyer.job.failure import Failure, first, names_lost_peer, write_atomically
from flyer.job.launcher_context import LauncherContext
from flyer.job.pod import (
    EXIT_PEER_LOST,
    EXIT_SUSPENDED,
    PodSpec,
    PodSpecError,
    agent_environment,
    log_name,
    rank_environment,
)
from flyer.job.script import error_path, read_error, run_command, starts_its_own_ranks

__all__ = ["become_launcher", "main", "run_pod"]

PEERS_SECONDS_MAX = 2.0  # time for the other ranks of a node to end after one failed
LEFTOVERS_SECONDS_MAX = 5.0
EXIT_BAD_POD = 2


@dataclass(slots=True)
class _Rank:
    local_rank: int
    rank: int
    log_path: Path
    log_offset: int
    """Offset in the log at which this attempt's output starts."""
    code: int | None = None
    """Exit status, or the negative number of the signal."""
    ended_at: float = 0.0
    terminated: bool = False
    """Whether the launcher signalled the rank and so caused its end."""


def become_launcher(spec: PodSpec, fork_server_pid: int) -> None:
    """Detach a forked child from the fork server, except for the signal at its death."""
    processes.default_signals()
    # Not SIGKILL: the launcher must end its group. Until its handler is set, the signal ends it.
    processes.die_with_parent(signal.SIGHUP, fork_server_pid)
    processes.close_descriptors()
    processes.redirect_output(Path(spec.run_dir, "launcher.log"))


def run_pod(spec: PodSpec, surroundings: LauncherContext | None = None) -> None:
    """Run the pod in this process. Never returns: the process exits like the pod or the rank."""
    launcher = _Launcher(spec, surroundings or LauncherContext())
    local_rank = launcher.start()
    if local_rank is not None:
        _become_rank(spec, local_rank, launcher)
        run_command(
            spec, spec.first_rank + local_rank
        )  # ends by SystemExit with an empty stack, as any script does
    _end_as(launcher.supervise())


class _Launcher:
    def __init__(self, spec: PodSpec, surroundings: LauncherContext) -> None:
        self._spec = spec
        self._surroundings = surroundings
        self._run_dir = Path(spec.run_dir)
        self.pid = os.getpid()
        self._ranks: dict[int, _Rank] = {}
        self.output: int | None = None  # in a rank: destination of its output; None: its file
        self._kill_at: float | None = None
        self._stopping = False  # requested by a signal
        self._signals: list[int] = []
        processes.set_name(f"pod-{spec.node}")
        processes.adopt_orphans()
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, self._die)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._signals.append(number))

    def _die(self, *_: object) -> None:
        """Kill every process of the pod immediately after the parent's death."""
        processes.reap_until_childless(LEFTOVERS_SECONDS_MAX)
        os._exit(128 + signal.SIGHUP)

    def start(self) -> int | None:
        """Fork the ranks. Returns the local rank in each of them, None in the launcher."""
        spec = self._spec
        count = 1 if starts_its_own_ranks(spec) else spec.ranks_per_node
        for local_rank in range(count):
            rank = spec.first_rank + local_rank
            log_path = Path(spec.log_dir, log_name(rank))
            with contextlib.suppress(FileNotFoundError):
                error_path(self._run_dir, rank).unlink()
            offset = log_path.stat().st_size if log_path.exists() else 0
            # Blocked until the child has set its handlers, so that no SIGTERM is lost.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self.output = self._surroundings.output_for(rank)
            pid = os.fork()
            if pid == 0:
                return local_rank
            if self.output is not None:
                os.close(self.output)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            self._ranks[pid] = _Rank(local_rank, rank, log_path, offset)
        pids = {"launcher": self.pid, "ranks": {str(r.rank): p for p, r in self._ranks.items()}}
        write_atomically(self._run_dir / "pids.json", json.dumps(pids))
        self._surroundings.started()
        return None

    def supervise(self) -> int:
        """Wait for every rank. Returns the exit status, or the negative number of a signal."""
        while any(rank.code is None for rank in self._ranks.values()):
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            for descriptor, events in self._surroundings.events().items():
                poll.register(descriptor, events)
            ready = dict(poll.poll(self._poll_milliseconds()))
            self._signals += self._surroundings.take(ready)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._reap()
            self._pass_signals_on()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_ranks(signal.SIGKILL)
                self._kill_at = None
        processes.reap_until_childless(LEFTOVERS_SECONDS_MAX)
        code, failure = self._conclude()
        self._surroundings.ended(code, failure)
        return code

    def _poll_milliseconds(self) -> int | None:
        times = [at for at in (self._kill_at, self._surroundings.due()) if at is not None]
        if not times:
            return None
        return max(int((min(times) - time.monotonic()) * 1000) + 1, 0)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._ranks.get(pid)
            if rank is None:
                continue  # an adopted orphan
            rank.code = os.waitstatus_to_exitcode(status)
            rank.ended_at = time.time()
            if rank.code not in (0, EXIT_SUSPENDED) and self._kill_at is None:
                # Its peers on this node would wait for the failed rank: end them.
                self._kill_at = time.monotonic() + PEERS_SECONDS_MAX
                self._signal_ranks(signal.SIGTERM)

    def _pass_signals_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if not self._stopping:
                self._stopping = True
                self._kill_at = time.monotonic() + self._spec.stop_grace_seconds
            self._signal_ranks(number)

    def _signal_ranks(self, number: int) -> None:
        for pid, rank in self._ranks.items():
            if rank.code is None:
                rank.terminated = True
                processes.kill_all([pid], number)

    def _conclude(self) -> tuple[int, Failure | None]:
        """Decide the pod's outcome and report the first failing rank."""
        codes = [rank.code or 0 for rank in self._ranks.values()]
        if self._stopping:
            # Exit statuses first: the status of a rank that saved after SIGTERM has priority over
            # a death by a signal.
            return next((code for code in codes if code == EXIT_SUSPENDED), _worst(codes)), None
        failures = [
            self._failure(rank)
            for rank in self._ranks.values()
            if rank.code not in (0, EXIT_SUSPENDED) and not self._excused(rank)
        ]
        failure = first(failures)
        if failure is None:
            return EXIT_SUSPENDED if EXIT_SUSPENDED in codes else 0, None
        failure.write(self._run_dir)
        self._surroundings.blame(failure.text())
        if failure.signal is not None:
            return -failure.signal, failure
        # Also for a rank that is another program, whose exit status does not report it.
        return EXIT_PEER_LOST if failure.peer_lost else failure.exit_status or 1, failure

    def _excused(self, rank: _Rank) -> bool:
        """Whether the launcher ended the rank before it failed by itself."""
        return rank.terminated and read_error(self._run_dir, rank.rank) is None

    def _failure(self, rank: _Rank) -> Failure:
        spec = self._spec
        error = read_error(self._run_dir, rank.rank)
        code = rank.code or 0
        traceback = error.traceback if error else self._printed_traceback(rank)
        peer_lost = error.peer_lost if error else code > 0 and names_lost_peer(traceback)
        return Failure(
            job=f"{spec.namespace}/{spec.job}",
            attempt=spec.attempt,
            node=spec.node,
            node_rank=spec.node_rank,
            rank=rank.rank,
            local_rank=rank.local_rank,
            time=error.time if error else rank.ended_at,
            exit_status=code if code >= 0 else error.exit_status if error else None,
            signal=-code if code < 0 and error is None else None,
            error_type=error.error_type if error else None,
            peer_lost=code == EXIT_PEER_LOST or peer_lost,
            traceback=traceback,
            log_path=str(rank.log_path),
        )

    def _printed_traceback(self, rank: _Rank) -> str | None:
        return self._surroundings.traceback(rank.rank, rank.log_path, rank.log_offset)


def _worst(codes: list[int]) -> int:
    """The outcome of all ranks: an exit status before a signal, any failure before success."""
    return next((code for code in codes if code > 0), min(codes, default=0))


def _become_rank(spec: PodSpec, local_rank: int, launcher: _Launcher) -> None:
    processes.default_signals()
    processes.die_with_parent(signal.SIGKILL, launcher.pid)
    processes.close_descriptors(() if launcher.output is None else (launcher.output,))
    agent = starts_its_own_ranks(spec)
    processes.set_name("torchrun" if agent else f"rank-{spec.first_rank + local_rank}")
    if launcher.output is None:
        processes.redirect_output(Path(spec.log_dir, log_name(spec.first_rank + local_rank)))
    else:
        processes.redirect_output_to(launcher.output)
    own = rank_environment(spec, local_rank)
    if agent:
        for name in set(own) - set(agent_environment(spec)):
            os.environ.pop(name, None)  # the driver itself may run under these
        own = agent_environment(spec)
    os.environ.update(own)


def _end_as(code: int) -> None:
    """Exit with the status, or die of the signal, so that the parent sees the pod's outcome."""
    if code < 0:
        number = -code
        if os.getpid() == 1:
            os._exit(128 + number)  # the kernel does not kill the first process of a container
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1.0)  # for a signal that does not end the process
        code = 128 + number
    sys.stdout.flush()
    os._exit(code)


def main(arguments: list[str] | None = None) -> int:
    """`flyer.job.launcher POD.json [MODULE,…]`: import the modules, then run a pod here."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        spec = PodSpec.from_json(Path(words[0]).read_bytes())
        for folder in (spec.log_dir, spec.run_dir):
            Path(folder).mkdir(parents=True, exist_ok=True)
    except (IndexError, OSError, PodSpecError) as error:
        sys.stderr.write(f"usage: python -m flyer.job.launcher POD.json [MODULE,…]: {error}\n")
        return EXIT_BAD_POD
    for name in ",".join(words[1:]).split(","):
        if name:
            importlib.import_module(name)
    run_pod(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())

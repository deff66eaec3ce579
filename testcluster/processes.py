"""Long-running processes of a cluster: start, find, restart and kill them by name.

A process is recognised by two variables in its environment (its cluster's state folder and its
name), never by a stored process ID, which could be stale. It finds leftovers of a killed `up`, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from testcluster.errors import ClusterError, tail

if TYPE_CHECKING:
    from testcluster.state import State

__all__ = ["Process", "enter", "kill_all", "pids_of_cluster", "wait_gone"]

STATE_VARIABLE = "FLYER_E2E_STATE"
NAME_VARIABLE = "FLYER_E2E_PROCESS"
LOAD_DEADLINE_S = 60.0
THREADS_FIELD = 17  # of /proc/PID/stat behind the name: how many threads there are


@dataclass(frozen=True)
class Process:
    """One process of a cluster; `start` stores its command, so that others can restart it."""

    state: State
    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    node: str | None = None  # the node whose namespaces it runs in
    unshare: tuple[str, ...] = ()  # the new namespaces that it runs in, as flags of unshare(1)

    @property
    def log(self) -> Path:
        """Where its standard output and error go."""
        return self.state.log(self.name)

    @classmethod
    def load(cls, state: State, name: str) -> Process:
        """A process that was started before, by its name."""
        path = state.folder / "processes" / f"{name}.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            names = sorted(file.stem for file in path.parent.glob("*.json"))
            raise ClusterError(f"no process {name} in {state.folder}; there are {names}") from None
        return cls(
            state,
            name,
            tuple(values["argv"]),
            values["environment"],
            values["node"],
            tuple(values["unshare"]),
        )

    def start(self) -> None:
        """Starts it in the background, away from this process's terminal and signals.

        On return the process can be found or has exited.
        """
        record = self.state.folder / "processes" / f"{self.name}.json"
        record.parent.mkdir(exist_ok=True)
        self.log.parent.mkdir(exist_ok=True)
        fields = ("argv", "environment", "node", "unshare")
        record.write_text(json.dumps({name: getattr(self, name) for name in fields}))
        environment = _clean_environment() | self.environment
        environment |= {STATE_VARIABLE: str(self.state.folder), NAME_VARIABLE: self.name}
        with self.log.open("a") as log:
            started = subprocess.Popen(
                [*self._wrapper(), *self.argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # A process has no mark until the kernel has loaded its program: seconds, from a cold disk.
        deadline = time.monotonic() + LOAD_DEADLINE_S
        while started.poll() is None and not self.pids():
            if time.monotonic() > deadline:
                raise self.failure(f"not loaded within {LOAD_DEADLINE_S:g} s")
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """Its process ids on this machine (its helpers that run another program not counted)."""
        program = Path(self.argv[0]).name
        return [
            pid
            for pid in pids_of_cluster(self.state, self.name)
            if _program(pid).removesuffix(" (deleted)") == program
        ]

    def kill(self, number: signal.Signals = signal.SIGKILL, deadline_s: float = 20) -> None:
        """Sends it a signal and waits until it has exited."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        remaining = wait_gone(pids, deadline_s)
        if remaining:
            raise ClusterError(
                f"{self.name} (process {remaining}) still runs {deadline_s:g} s after {number.name}"
            )

    def restart(self) -> None:
        """Kills it and starts it as it was."""
        self.kill()
        self.start()

    def failure(self, reason: str) -> ClusterError:
        """An error about this process, with the end of its log."""
        return ClusterError(f"{self.name}: {reason}; {self.log} ends with:\n{tail(self.log)}")

    def _wrapper(self) -> list[str]:
        if self.unshare:
            return ["unshare", *self.unshare, "--"]
        return [] if self.node is None else enter(self.state, self.node)


def enter(state: State, node: str) -> list[str]:
    """The command prefix that runs a command in a node's namespaces."""
    inits = Process.load(state, f"{node}-init").pids()
    if not inits:
        raise ClusterError(f"node {node} does not run; its log is {state.log(f'{node}-init')}")
    flags = ["--mount", "--net", "--uts", "--ipc", "--pid"]
    return ["nsenter", "--target", str(min(inits)), *flags, "--"]


def pids_of_cluster(state: State, name: str | None = None) -> list[int]:
    """The live processes that carry this cluster's mark (and this name, where one is given)."""
    marks = {f"{STATE_VARIABLE}={state.folder}".encode()}
    if name is not None:
        marks.add(f"{NAME_VARIABLE}={name}".encode())
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                pids.append(int(folder.name))
    return pids


def kill_all(state: State, deadline_s: float = 30) -> None:
    """Kills every process of the cluster; on return none is left."""
    deadline = time.monotonic() + deadline_s
    empty_scans = 0
    # Check twice: between fork and exec, a process of a killed `up` has no mark yet.
    while empty_scans < 2:
        pids = pids_of_cluster(state)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if wait_gone(pids, deadline - time.monotonic()):
            raise ClusterError(f"processes {pids} of {state.folder} do not die")
        empty_scans = 0 if pids else empty_scans + 1
        time.sleep(0.05)


def wait_gone(pids: list[int], deadline_s: float) -> list[int]:
    """Waits for the end of these processes; returns those that are left at the deadline."""
    deadline = time.monotonic() + deadline_s
    while remaining := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > deadline:
            return remaining
        time.sleep(0.01)
    return []


def _alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # a child of this process: reap it, or it stays a zombie
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    fields = status.rpartition(")")[2].split()
    # The main thread has exited but others still run: all files and ports are still open.
    return fields[0] not in "ZX" or int(fields[THREADS_FIELD]) > 1


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""


def _clean_environment() -> dict[str, str]:
    """A minimal environment without the caller's proxies, credentials and Python settings."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}

"""Service processes: start them, detect their exit, restart them after a pause, stop them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from threefs.cluster import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.supervisor.folder import DataFolder
    from threefs.supervisor.plan import Service

__all__ = ["Child", "Processes"]

STOP_SECONDS = 5.0
"""Time that a service has to exit after SIGTERM before it is killed."""
TAIL_BYTES = 2000


@dataclass
class Child:
    """One service and its current process, if it has one."""

    service: Service
    process: subprocess.Popen[bytes] | None = None
    due: float | None = None
    restarts: int = 0
    ends: list[str] = field(default_factory=list)


class Processes:
    """All services. Use from one thread only: children die with the thread that started them."""

    def __init__(
        self,
        services: list[Service],
        folder: DataFolder,
        restart_after_seconds: float,
        log: Callable[[str], None],
    ) -> None:
        self.children = [Child(service) for service in services]
        self._folder = folder
        self._restart_after_seconds = restart_after_seconds
        self._log = log

    def start_all(self) -> None:
        """Start every service."""
        for child in self.children:
            self._start(child)

    def pids(self) -> dict[str, int]:
        """Process ids of the running services."""
        return {c.service.name: c.process.pid for c in self.children if c.process is not None}

    def poll(self) -> bool:
        """Detect ended processes and restart those that are due; true if anything changed."""
        changed = False
        for child in self.children:
            if child.process is not None and (status := child.process.poll()) is not None:
                self._ended(child, status)
                changed = True
            if child.process is None and child.due is not None and time.monotonic() >= child.due:
                self._start(child)
                child.restarts += 1
                changed = True
        return changed

    def pause_seconds(self, longest: float) -> float:
        """Seconds until a restart is due, at most `longest`."""
        now = time.monotonic()
        dues = [child.due - now for child in self.children if child.due is not None]
        return max(0.0, min([longest, *dues]))

    def stop_all(self, stop_seconds: float = STOP_SECONDS) -> None:
        """Stop every service with SIGTERM, and with SIGKILL after `stop_seconds`.

        Members of etcd stop last, so that services can complete what they are doing.
        """
        members = [child for child in self.children if child.service.kind == "etcd"]
        self._stop([child for child in self.children if child not in members], stop_seconds)
        self._stop(members, stop_seconds)

    @staticmethod
    def _stop(children: list[Child], stop_seconds: float) -> None:
        living = [child.process for child in children if child.process is not None]
        for process in living:
            process.send_signal(signal.SIGTERM)
            # A stopped process receives SIGTERM only after it is continued.
            process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + stop_seconds
        for process in living:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in children:
            child.process, child.due = None, None

    def tail(self, name: str) -> str:
        """The last line that a service wrote to its log."""
        try:
            text = self._folder.log(name).read_bytes()[-TAIL_BYTES:]
        except OSError:
            return ""
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _start(self, child: Child) -> None:
        service = child.service
        config = self._folder.path / "config" / f"{service.name}.json"
        write_atomically(config, json.dumps(service.config, indent=2) + "\n")
        command = [sys.executable, "-P", "-m", "threefs.service", service.kind, str(config)]
        with self._folder.log(service.name).open("ab") as log:
            child.process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal reaches only the supervisor, which stops the services.
                process_group=0,
            )
        child.due = None

    def _ended(self, child: Child, status: int) -> None:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        child.process = None
        child.due = time.monotonic() + self._restart_after_seconds
        child.ends.append(how)
        del child.ends[:-8]
        last = f": {self.tail(child.service.name)}" if status > 0 else ""
        self._log(
            f"{child.service.name} ended ({how}), "
            f"restarts in {self._restart_after_seconds:g} s{last}"
        )

"""Clients of a run, and its faults: processes that are started, killed, stopped and continued."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.chaos.cluster import ChaosCluster, ChaosError
from bench.chaos.faults import STOP, Fault
from bench.report import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.chaos.workload import ClientPlan

__all__ = ["Disturbance", "disturb"]

POLL_SECONDS = 0.02
REST_SECONDS = 1.0
"""Load after the last stopped process was continued."""
END_SECONDS = 10.0


@dataclass(slots=True)
class Disturbance:
    """What happened."""

    started_ns: int = 0
    ended_ns: int = 0
    faults: list[tuple[Fault, str, int]] = field(default_factory=list)
    """Each with the name of its victim and its time."""
    killed_clients: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    stall_seconds: float = 0.0
    """Longest time in which this process got no processor: the services may have waited as long."""


class _Load:
    def __init__(self, cluster: ChaosCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.clients: list[subprocess.Popen[str]] = []
        self.stopped: list[tuple[int, int]] = []
        self.result = Disturbance()

    def start_client(self, plan: ClientPlan) -> None:
        path = self.folder / f"client-{plan.number}.json"
        plan.write(path)
        with path.with_suffix(".log").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.chaos.client", str(path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            )  # fmt: skip
        self.clients.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise ChaosError(f"client {plan.number} did not start: see {self.folder}")

    def wait_until(self, time_ns: int) -> None:
        """Continues stopped processes meanwhile, each at its time."""
        while (now := time.monotonic_ns()) < time_ns:
            self.continue_stopped(lambda until_ns, now=now: until_ns <= now)  # type: ignore[misc]
            pause = min(POLL_SECONDS, (time_ns - now) / 1e9)
            time.sleep(pause)
            late = (time.monotonic_ns() - now) / 1e9 - pause
            self.result.stall_seconds = max(self.result.stall_seconds, late)

    def inject(self, fault: Fault) -> None:
        if fault.victim == "client":
            client = fault.choice % len(self.clients)
            self.result.killed_clients.add(client)
            name, pid = f"client-{client}", self.clients[client].pid
        else:
            name = self.cluster.find(fault.victim, fault.choice)
            pid = self.cluster.pids()[name]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if fault.action == STOP else signal.SIGKILL)
        now = time.monotonic_ns()
        if fault.action == STOP:
            self.stopped.append((pid, now + int(fault.stopped_seconds * 1e9)))
        self.result.faults.append((fault, name, now))

    def continue_stopped(self, is_due: Callable[[int], bool] = lambda _: True) -> None:
        for pid, until_ns in list(self.stopped):
            if is_due(until_ns):
                self.stopped.remove((pid, until_ns))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def end_clients(self, seconds: float) -> None:
        living = [
            (number, process)
            for number, process in enumerate(self.clients)
            if number not in self.result.killed_clients
        ]
        for _, process in living:
            assert process.stdin is not None
            process.stdin.close()
        for number, process in living:
            assert process.stdout is not None
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                self.result.errors.append(f"client {number} hangs")
                continue
            lines = process.stdout.read().splitlines()
            self.result.errors += [f"client {number}: {line}" for line in lines]

    def close(self) -> None:
        for process in self.clients:
            process.kill()
            process.wait()
        self.continue_stopped()


def disturb(
    cluster: ChaosCluster, plans: Sequence[ClientPlan], faults: Sequence[Fault], seconds: float,
    folder: Path,
) -> Disturbance:  # fmt: skip
    """Runs the clients for `seconds`, or longer if a process is stopped then, with these faults."""
    load = _Load(cluster, folder)
    result = load.result
    try:
        for plan in plans:
            load.start_client(plan)
        result.started_ns = time.monotonic_ns()
        for fault in faults:
            load.wait_until(result.started_ns + int(fault.after_seconds * 1e9))
            load.inject(fault)
        continued_ns = max((until_ns for _, until_ns in load.stopped), default=0)
        load.wait_until(
            max(result.started_ns + int(seconds * 1e9), continued_ns + int(REST_SECONDS * 1e9))
        )
        result.ended_ns = time.monotonic_ns()
        load.end_clients(max(plan.timeout_seconds for plan in plans) + END_SECONDS)
    finally:
        load.close()
    return result

"""Ranks of a fault injection round: local processes on simulated machines.

The ranks are forked, run without torch and report over pipes. With root rights every machine is a
network namespace whose cable can be pulled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from array import array
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import hfreduce
from hfreduce import _native
from hfreduce._native import Settings

from bench.netns import Network, enter, sh

__all__ = ["LIVENESS_SECONDS", "OPERATION_SECONDS", "RANKS", "Machines", "Round"]

RANKS = 32
LIVENESS_SECONDS = 0.7
"""Time without a message after which a rank counts as stalled. The default is longer: a false
alarm costs a job more than some seconds."""
OPERATION_SECONDS = 30.0
"""Timeout of the operations: no survivor may reach it."""
DEADLINE_SECONDS = 60.0
ELEMENTS = (1, 1 << 10, 1 << 14, 1 << 16)
"""Sizes of the allreduces that all ranks call in turn, fp32."""

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Machines:
    """The machines on which the ranks of a round run."""

    count: int
    network: Network | None

    def of(self, rank: int) -> int:
        """The machine of a rank."""
        return rank * self.count // RANKS

    def document(self) -> dict[str, object]:
        """The topology file."""
        nodes = [
            {
                "name": f"n{machine}",
                "zone": "AB"[machine * 2 // max(self.count, 2)],
                "address": self.network.address(machine) if self.network else "127.0.0.1",
            }
            for machine in range(self.count)
        ]
        return {"version": 1, "ranks_per_node": RANKS // self.count, "nodes": nodes}

    def enter(self, rank: int) -> None:
        """Moves this process to the machine of a rank."""
        if self.network is None:
            return
        enter(self.network.host(self.of(rank)))

    def cable(self, machine: int, state: str) -> None:
        """Disconnects a machine from the network, or connects it again."""
        assert self.network is not None
        switch = self.network.switch(self.network.zone_of(machine))
        sh("ip", "-n", switch, "link", "set", f"p{machine}", state)


class Rendezvous:
    """Rendezvous of a round's ranks, served by the program that started them."""

    def __init__(self, line: Connection, key: bytes) -> None:
        self._line, self._key = line, key

    @property
    def host(self) -> None:
        """All ranks are on this machine."""
        return

    def exchange(self, phase: str, value: str, timeout_seconds: float) -> tuple[str, list[bytes]]:
        """The values of all ranks, in rank order; the exchange needs no name."""
        self._line.send(value.encode())
        if not self._line.poll(timeout_seconds):
            raise TimeoutError(f"not all ranks reached {phase}")
        return "", self._line.recv()

    def key(self, timeout_seconds: float) -> bytes:  # noqa: ARG002  (a rendezvous' signature)
        """The key of this round."""
        return self._key


def rank_main(rank: int, line: Connection, environment: dict[str, str], key: bytes) -> None:
    """Runs one rank: calls allreduce until one fails, then reports the error."""
    membership = _native.Membership(rank, range(RANKS), RANKS)
    settings = Settings.read(environment)
    rendezvous = Rendezvous(line, key)
    communicator = _native.join(rendezvous, membership, settings, DEADLINE_SECONDS)
    saying = threading.Lock()
    threading.Thread(target=obey, args=(line, saying), daemon=True).start()
    arrays = [array("f", [1.0]) * count for count in ELEMENTS]
    with saying:
        line.send(("connected", connections()))
    try:
        while True:
            for memory in arrays:
                hfreduce.allreduce(memory, communicator, timeout_seconds=OPERATION_SECONDS)
                memory[0] = 1.0
    except hfreduce.CollectiveError as error:
        at = time.monotonic()
        with saying:
            line.send(("failed", at, error.peer, error.kind, str(error)))
    # A rank that continues with `reconfigure` does not exit. Thirty processes that exit on two
    # cores take processor time from the ranks that have not raised yet.
    threading.Event().wait(DEADLINE_SECONDS)


def connections() -> dict[tuple[Any, Any], int]:
    """This process's TCP connections: (local address, peer address) and descriptor."""
    result = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    own, peer = connection.getsockname(), connection.getpeername()
                    result[address(own), address(peer)] = int(entry.name)
    return result


def address(name: tuple[Any, ...]) -> tuple[str, int]:
    """Normalizes an address, independent of its socket's address family."""
    return name[0].removeprefix("::ffff:"), name[1]


def obey(line: Connection, saying: threading.Lock) -> None:
    """Shuts down the named connection: both ends see it close and both processes stay alive."""
    with contextlib.suppress(EOFError, OSError):
        descriptor = line.recv()
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            at = time.monotonic()
            connection.shutdown(socket.SHUT_RDWR)
        with saying:
            line.send(("cut", at))


class Round:
    """One group, from its start to the last survivor's error."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        self.lines: list[Connection] = []
        self.children: list[int] = []
        self.failed: dict[int, tuple[float, int | None, str, str]] = {}
        self.cut_at: float | None = None
        self.pairs: dict[tuple[int, int], int] = {}
        (folder / "topology.json").write_text(json.dumps(machines.document()), encoding="utf-8")
        environment = {
            "FLYER_TOPOLOGY": str(folder / "topology.json"),
            "FLYER_JOB": "bench/failures",
            "HFREDUCE_TRANSPORT": "tcp",
            "HFREDUCE_LIVENESS_SECONDS": str(LIVENESS_SECONDS),
            "HFREDUCE_RUN_DIR": str(folder),
            "HFREDUCE_DUMP_DIR": str(folder),
        }
        key = os.urandom(32)
        for rank in range(RANKS):
            own_end, rank_end = Pipe()
            child = os.fork()
            if child == 0:
                self._be(rank, rank_end, environment, key)
            rank_end.close()
            self.lines.append(own_end)
            self.children.append(child)

    def _be(self, rank: int, line: Connection, environment: dict[str, str], key: bytes) -> None:
        """Runs the child process; never returns."""
        status = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for inherited in self.lines:
                inherited.close()
            self.machines.enter(rank)
            rank_main(rank, line, environment, key)
            status = 0
        except BaseException as error:  # noqa: BLE001  (the child exits here on any error)
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)

    def meet(self) -> None:
        """Waits until all ranks are connected to each other."""
        for _ in ("place", "endpoint"):
            values = [self._hear(rank) for rank in range(RANKS)]
            for line in self.lines:
                line.send(values)
        sockets = [self._hear(rank)[1] for rank in range(RANKS)]
        owners = {
            ends: rank for rank, sockets_of_rank in enumerate(sockets) for ends in sockets_of_rank
        }
        for rank, sockets_of_rank in enumerate(sockets):
            for (own, peer), descriptor in sockets_of_rank.items():
                if (peer, own) in owners:
                    self.pairs[rank, owners[peer, own]] = descriptor

    def _hear(self, rank: int) -> Any:
        if not self.lines[rank].poll(DEADLINE_SECONDS):
            raise TimeoutError(f"rank {rank} does not come")
        return self.lines[rank].recv()

    def collect(self, expected: set[int], seconds: float) -> None:
        """Collects failure reports until all of these ranks have reported or the timeout ends."""
        until = time.monotonic() + seconds
        lines = {line: rank for rank, line in enumerate(self.lines)}
        while expected - set(self.failed) and (remaining := until - time.monotonic()) > 0:
            for line in wait(list(lines), timeout=remaining):
                assert isinstance(line, Connection)
                try:
                    word, *values = line.recv()
                except (EOFError, OSError):
                    del lines[line]
                    continue
                if word == "cut":
                    self.cut_at = values[0]
                else:
                    self.failed[lines[line]] = tuple(values)

    def end(self) -> None:
        """Ends all remaining processes."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        for line in self.lines:
            line.close()

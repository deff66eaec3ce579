"""Starts the ranks of a measurement as children of this process and waits until all have ended.

Ranks are forked, so nothing is loaded again, and die with their parent. Rank 0 listens at a free
port and sends its number to the other ranks through a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hfreduce.perf.options import Options

__all__ = ["FAILED", "Port", "run"]

FAILED = 3
"""Exit status of a rank that failed."""

_GRACE_SECONDS = 15.0
"""Time for the other ranks to detect the first failure and end."""

_PR_SET_PDEATHSIG = 1


class Port:
    """Rank 0's port: rank 0 publishes it, the other ranks wait for it."""

    def __init__(self, peers: int) -> None:
        self._others = peers
        self._reader, self._writer = os.pipe()
        self._word, writer = os.pipe()
        os.write(writer, b"!")
        os.close(writer)

    def publish(self, port: int) -> None:
        """Publishes the port at which rank 0 listens."""
        os.write(self._writer, port.to_bytes(2, "little") * self._others)

    def speaks(self) -> bool:
        """True for the first caller: only one rank reports the failure."""
        return bool(os.read(self._word, 1))

    def close_writer(self) -> None:
        """Leaves rank 0 as the only writer, so that its exit ends the others' wait."""
        os.close(self._writer)

    def wait(self) -> int:
        """Waits for the port at which rank 0 listens."""
        self.close_writer()
        received = os.read(self._reader, 2)
        if len(received) < 2:
            raise ConnectionError("rank 0 exited before it listened: see its output")
        return int.from_bytes(received, "little")


def run(
    options: Options,
    ranks: int,
    environment: Mapping[str, str],
    body: Callable[[Mapping[str, str], Port], int],
) -> int:
    """Runs `body` as every rank of a group on this machine; the exit status of the whole."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="hfreduce-perf-") as folder:
        common = _environment(options, ranks, environment, Path(folder))
        port = Port(ranks - 1)
        children: dict[int, int] = {}
        status = FAILED
        try:
            for rank in range(ranks):
                child = os.fork()
                if child == 0:
                    _be(body, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, port)
                children[os.pidfd_open(child)] = child
            port.close_writer()
            status = _wait(dict(children), port)
        finally:
            for descriptor, child in children.items():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
                os.close(descriptor)
    return status


def _environment(
    options: Options, ranks: int, environment: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Environment that a launcher would set, with a key and, for simulated nodes, a topology."""
    common = {name: value for name, value in environment.items() if name != "FLYER_TOPOLOGY"}
    key = folder / "key"
    key.write_text(secrets.token_hex(32), encoding="ascii")
    common |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "HFREDUCE_KEY_FILE": str(key),
        "HFREDUCE_ADDRESS": "127.0.0.1",
    }
    if options.nodes > 1:
        zones = [f"zone{i * options.zones // options.nodes}" for i in range(options.nodes)]
        nodes = [
            {"name": f"node{i}", "zone": zone, "address": "127.0.0.1"}
            for i, zone in enumerate(zones)
        ]
        topology = {"version": 1, "ranks_per_node": ranks // options.nodes, "nodes": nodes}
        path = folder / "topology.json"
        path.write_text(json.dumps(topology), encoding="utf-8")
        common["FLYER_TOPOLOGY"] = str(path)
        # On one machine nodes would share memory: simulated nodes are for measuring TCP.
        common.setdefault("HFREDUCE_TRANSPORT", "tcp")
    return common


def _be(
    body: Callable[[Mapping[str, str], Port], int], environment: Mapping[str, str], port: Port
) -> None:
    """The child: it never returns."""
    status = FAILED
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            status = body(environment, port)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001  (os._exit below would swallow it)
        # `body` did not report this error, and the errors of other ranks follow from it.
        port.speaks()
        # One write: several ranks may fail, and their reports must not mix.
        rank, trace = environment["RANK"], traceback.format_exc()
        sys.stderr.write(f"hfreduce-perf: rank {rank} ended by a fault: {trace}")
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(children: dict[int, int], port: Port) -> int:
    """Waits until all ranks have ended; after a failure, at most the grace period.

    Returns the status of the first failure, and reports it if no rank has.
    """
    ranks = {descriptor: rank for rank, descriptor in enumerate(children)}
    poller = select.poll()
    for descriptor in children:
        poller.register(descriptor, select.POLLIN)
    status, first, ended = 0, 0, False
    deadline: float | None = None
    while children:
        remaining = None if deadline is None else max(deadline - time.monotonic(), 0)
        ready = poller.poll(None if remaining is None else remaining * 1000)
        if not ready:
            break
        for descriptor, _ in ready:
            poller.unregister(descriptor)
            _, word = os.waitpid(children.pop(descriptor), 0)
            code = os.waitstatus_to_exitcode(word)
            if code < 0:
                print(
                    f"hfreduce-perf: rank {ranks[descriptor]} was ended by signal {-code}",
                    file=sys.stderr,
                )
                code, ended = FAILED, True
            if code and not status:
                status, deadline = code, time.monotonic() + _GRACE_SECONDS
                first = ranks[descriptor]
    if status == FAILED and not ended and port.speaks():
        print(
            f"hfreduce-perf: rank {first} ended with status {status} without an error message",
            file=sys.stderr,
        )
    return status

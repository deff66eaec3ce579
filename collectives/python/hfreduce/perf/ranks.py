"""Starts the ranks of a measurement as children of this process, and sees that all of them end.

They are forked: nothing has to be loaded again, and none outlives its parent. Rank 0 finds a free
port and tells it to the others through a pipe, so no port is guessed.
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
"""How long the others get to end after the first failure: they learn of it by themselves."""

_PR_SET_PDEATHSIG = 1


class Port:
    """Rank 0's port: told by it, awaited by the others."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._reader, self._writer = os.pipe()
        self._word, writer = os.pipe()
        os.write(writer, b"!")
        os.close(writer)

    def tell(self, port: int) -> None:
        """Rank 0 listens there."""
        os.write(self._writer, port.to_bytes(2, "little") * self._others)

    def speaks(self) -> bool:
        """True for the first rank that asks: one of them says what went wrong, not all."""
        return bool(os.read(self._word, 1))

    def wait(self) -> int:
        """Where rank 0 listens."""
        os.close(self._writer)
        told = os.read(self._reader, 2)
        if len(told) < 2:
            raise ConnectionError("rank 0 ended before it listened")
        return int.from_bytes(told, "little")


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
    """What a launcher would set, with a key and, for pretended machines, a topology."""
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
        # On one machine nodes would share memory: pretended machines are for measuring TCP.
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
        # A fault of the program, which `body` knows nothing of: the others' words follow from it.
        port.speaks()
        # In one piece: several ranks may have it, and one of them is the cause of the others'.
        rank, told = environment["RANK"], traceback.format_exc()
        sys.stderr.write(f"hfreduce-perf: rank {rank} ended by a fault: {told}")
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(children: dict[int, int], port: Port) -> int:
    """Until all have ended; after a failure, until the grace is over. The first failure counts.

    No failure ends without a word: what no rank has said is said here.
    """
    ranks = {descriptor: rank for rank, descriptor in enumerate(children)}
    poller = select.poll()
    for descriptor in children:
        poller.register(descriptor, select.POLLIN)
    status, first, ended = 0, 0, False
    deadline: float | None = None
    while children:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        ready = poller.poll(None if left is None else left * 1000)
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
            f"hfreduce-perf: rank {first} ended with status {status} and no word", file=sys.stderr
        )
    return status

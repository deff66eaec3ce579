"""`hfreduce-perf`: the program. `hfreduce-perf --help` describes options and exit statuses."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hfreduce._native import Rendezvous
from hfreduce.errors import CollectiveError, RendezvousError, SettingError, TopologyError
from hfreduce.perf import ranks as local
from hfreduce.perf.measure import Call, Row, measure, shapes
from hfreduce.perf.options import Options, parse
from hfreduce.perf.report import Table, document, trace
from hfreduce.sizes import size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["main"]

_DEFAULT_RANKS = 8
_RIGHT, _WRONG, _USAGE, _INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and options.ranks is not None:
        print(
            "hfreduce-perf: RANK and WORLD_SIZE are set, so a launcher has started this rank; "
            "-g and --nodes start ranks themselves. Leave them out, or unset RANK.",
            file=sys.stderr,
        )
        return _USAGE
    try:
        if launched:
            return _rank(options, os.environ, None)
        count = options.ranks or _DEFAULT_RANKS
        return local.run(options, count, os.environ, lambda env, port: _rank(options, env, port))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _rank(options: Options, environment: Mapping[str, str], port: local.Port | None) -> int:
    """One rank, to its end."""
    try:
        return _measure(options, environment, port)
    except (SettingError, TopologyError, _Refused) as error:
        failure: Exception = error
        status = _USAGE
    except (CollectiveError, RendezvousError, ValueError, OSError, MemoryError) as error:
        failure, status = error, local.FAILED
    if port is None or port.speaks():
        print(f"hfreduce-perf: {str(failure) or type(failure).__name__}", file=sys.stderr)
    return status


class _Refused(Exception):  # noqa: N818  (it is one: what was asked for cannot be)
    """These options make no sense for this group."""


def _measure(options: Options, environment: Mapping[str, str], port: local.Port | None) -> int:
    rendezvous = _rendezvous(environment, port)
    rank, size = rendezvous.rank, rendezvous.world_size
    _check(options, size)
    limit = rendezvous.settings.connect_seconds
    deadline = time.monotonic() + limit
    machines, names = _machines(rendezvous, limit)
    communicator = rendezvous.join(max(deadline - time.monotonic(), 0.1))
    calls: list[Call] | None = [] if options.trace else None
    rows: list[Row] = []
    visible = rank == 0
    to_stdout = options.json == "-"
    table = Table(options, machines, sys.stderr if to_stdout else sys.stdout) if visible else None
    progress = _Progress(options, size, visible=visible and sys.stderr.isatty() and not to_stdout)
    for row in measure(communicator, options, machines, calls):
        rows.append(row)
        progress.clear()
        if table:
            table.row(row)
        progress.show(len(rows))
    if table:
        table.end()
        _write(options, machines, names, rows, calls)
    communicator.close()
    return _WRONG if any(row.wrong > 0 for row in rows) else _RIGHT


def _rendezvous(environment: Mapping[str, str], port: local.Port | None) -> Rendezvous:
    """The rendezvous of the group: at a launcher's address, or at a free port of rank 0."""
    if port is None:
        return Rendezvous(environment)
    first = environment["RANK"] == "0"
    at = 0 if first else port.wait()
    local_environment = {**environment, "HFREDUCE_RENDEZVOUS": f"127.0.0.1:{at}"}
    rendezvous = Rendezvous(local_environment)
    if first:
        port.publish(rendezvous.port)
    return rendezvous


def _check(options: Options, size: int) -> None:
    if options.root >= size:
        raise _Refused(f"-r {options.root}: there are {size} ranks, numbered from 0")
    if options.collective.name == "sendrecv" and size == 1:
        raise _Refused("sendrecv needs two ranks or more")


def _machines(rendezvous: Rendezvous, timeout_seconds: float) -> tuple[list[int], list[str]]:
    """The number of each rank's machine, by first appearance, and the machines' names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    own = json.dumps([boot or socket.gethostname(), socket.gethostname()]).encode()
    values = rendezvous.exchange("machine", own, timeout_seconds)
    machines = [json.loads(value) for value in values]
    order = list(dict.fromkeys(machine for machine, _ in machines))
    names: dict[str, str] = dict(reversed(machines))
    return [order.index(machine) for machine, _ in machines], [names[machine] for machine in order]


def _write(
    options: Options,
    machines: Sequence[int],
    names: Sequence[str],
    rows: Sequence[Row],
    calls: Sequence[Call] | None,
) -> None:
    if options.json:
        text = json.dumps(document(options, machines, rows), indent=1)
        if options.json == "-":
            print(text, flush=True)
        else:
            Path(options.json).write_text(text + "\n", encoding="utf-8")
    if options.trace:
        trace(options.trace, calls or [], names)


class _Progress:
    """Progress line on a terminal, overwritten in place."""

    def __init__(self, options: Options, size: int, *, visible: bool) -> None:
        self._rows = shapes(options, size) if visible else []
        self._size = size
        self.show(0)

    def show(self, count: int) -> None:
        """Shows that row `count` is being measured."""
        if count < len(self._rows):
            shape = self._rows[count]
            text = f"{shape.kind.name} {shape.op} {size_text(shape.size_bytes(self._size))}"
            print(f"\r{count + 1}/{len(self._rows)}: {text} …", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Makes room for the table."""
        if self._rows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

"""One rank's part of a measurement: each row in turn, with the memory bandwidth at that time."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfreduce import _native
from hfreduce.perf import oracle
from hfreduce.perf.workloads import Pages, Shape, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hfreduce.perf.options import Options

__all__ = ["Call", "Row", "measure", "shapes"]

_TRIAD_BYTES = 1 << 30
"""Size limit of all arrays: much larger than any cache, much smaller than a node's memory."""
_TRIAD_ARRAY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, the same on all ranks."""

    shape: Shape
    size_bytes: int
    seconds: float
    """Time of one operation, aggregated as `--average` selects."""
    slowest_seconds: float
    fastest_seconds: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    wrong: int
    """Wrong elements on all ranks; -1 if nothing was checked."""
    triad_bytes_per_second: float
    """On the machine of rank 0."""
    of_limit: float
    """Share of the memory bandwidth on the machine of rank 0; above 1, data was in caches."""


@dataclass(frozen=True, slots=True)
class Call:
    """One timed operation of one rank, for the trace; times on rank 0's clock."""

    rank: int
    machine: int
    shape: Shape
    size_bytes: int
    number: int
    start_seconds: float
    seconds: float


def shapes(options: Options, ranks: int) -> list[Shape]:
    """All rows, in the order of the table."""
    result = []
    for kind in options.kinds:
        for op in options.ops:
            if options.collective.reduces and not oracle.supports(kind, op):
                continue
            for size in options.sizes:
                count = size // kind.item_bytes // (ranks if options.collective.split else 1)
                shape = Shape(options.collective, kind, op, options.root, count, options.tensors)
                if shape not in result:
                    result.append(shape)
    return result


def measure(
    communicator: _native.Communicator,
    options: Options,
    machines: Sequence[int],
    calls: list[Call] | None,
) -> Iterator[Row]:
    """Yields every row when it is measured, equal on all ranks. Adds to `calls` on rank 0."""
    rank, ranks = communicator.rank, communicator.world_size
    local_ranks = [other for other in range(ranks) if machines[other] == machines[rank]]
    triad = _triad(len(local_ranks)) if rank == local_ranks[0] else None
    rows = shapes(options, ranks)
    size = max(shape.size_bytes(ranks) for shape in rows)
    memories = (Pages(size), Pages(size if _needs_output(options) else 0))
    exchange = _Exchange(communicator, options.timeout_seconds)
    for shape in rows:
        work = Workload(communicator, shape, memories, options.timeout_seconds)
        work.prepare()
        exchange.barrier()
        speed = triad.measure() if triad else 0.0
        exchange.barrier()
        for _ in range(options.warmup):
            work.run()
        times = _timed(work, options.iterations, exchange, each=calls is not None)
        wrong = _wrong(work, exchange) if options.check else 0
        own = (times[-1] - times[0]) / options.iterations
        reports = exchange.all([own, float(wrong), speed])
        if calls is not None:
            starts = exchange.all(times)
            if rank == 0:
                calls += _calls(shape, shape.size_bytes(ranks), starts, machines)
        triad_speed = max(report[2] for report, machine in zip(reports, machines, strict=True)
                          if machine == machines[0])  # fmt: skip
        total = int(sum(report[1] for report in reports)) if options.check else -1
        yield _row(shape, options, machines, [report[0] for report in reports], total, triad_speed)


def _row(
    shape: Shape,
    options: Options,
    machines: Sequence[int],
    times: Sequence[float],
    wrong: int,
    triad_speed: float,
) -> Row:
    ranks = len(machines)
    mean = sum(times) / ranks
    of = {"rank0": times[0], "avg": mean, "min": min(times), "max": max(times)}
    seconds = of[options.average]
    size = shape.size_bytes(ranks)
    moved = size * shape.collective.traffic(machines.count(machines[0]), ranks)
    algorithm = size / seconds
    return Row(
        shape=shape,
        size_bytes=size,
        seconds=seconds,
        slowest_seconds=max(times),
        fastest_seconds=min(times),
        algorithm_bytes_per_second=algorithm,
        bus_bytes_per_second=algorithm * shape.collective.bus_factor(ranks),
        wrong=wrong,
        triad_bytes_per_second=triad_speed,
        of_limit=moved / triad_speed / seconds,
    )


def _timed(work: Workload, count: int, exchange: _Exchange, *, each: bool) -> list[float]:
    """Start of the first operation and end of the last; with `each`, the end of every one."""
    clock, run = time.monotonic, work.run
    exchange.barrier()
    times = [clock()]
    if each:
        for _ in range(count):
            run()
            times.append(clock())
        return times
    for _ in range(count):
        run()
    times.append(clock())
    return times


def _wrong(work: Workload, exchange: _Exchange) -> int:
    """Wrong elements after one more operation on new data: reductions overwrite their inputs."""
    exchange.barrier()
    work.prepare()
    work.run()
    return work.wrong()


def _triad(ranks_here: int) -> _native.Triad:
    threads = min(len(os.sched_getaffinity(0)), ranks_here)
    array = max(min(_TRIAD_ARRAY_BYTES, _TRIAD_BYTES // (3 * threads)), 1 << 20)
    return _native.Triad(threads, array)


def _needs_output(options: Options) -> bool:
    return options.collective.split or options.collective.name == "sendrecv"


def _calls(
    shape: Shape, size: int, times: Sequence[Sequence[float]], machines: Sequence[int]
) -> Iterator[Call]:
    """The clocks of machines differ: the barrier before the row aligns them."""
    first = {m: min(t[0] for t, of in zip(times, machines, strict=True) if of == m)
             for m in set(machines)}  # fmt: skip
    for rank, (own, machine) in enumerate(zip(times, machines, strict=True)):
        shift = first[machines[0]] - first[machine]
        for number, (start, end) in enumerate(itertools.pairwise(own)):
            yield Call(rank, machine, shape, size, number, start + shift, end - start)


class _Exchange:
    """Exchange between rows, through the communicator that is measured."""

    def __init__(self, communicator: _native.Communicator, timeout_seconds: float) -> None:
        self._communicator = communicator
        self._timeout = timeout_seconds

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._communicator.barrier(self._timeout, True).wait()

    def all(self, values: Sequence[float]) -> list[list[float]]:
        """The lists of all ranks, in rank order; all have one length."""
        count, ranks = len(values), self._communicator.world_size
        own = (ctypes.c_double * count)(*values)
        gathered = (ctypes.c_double * (count * ranks))()
        self._communicator.allgather(
            ctypes.addressof(own),
            ctypes.addressof(gathered),
            count,
            _native.FLOAT64,
            self._timeout,
            True,
        ).wait()
        return [gathered[rank * count : (rank + 1) * count] for rank in range(ranks)]

"""Workloads of the collectives: data, one call, the expected result, and the bytes moved.

Sizes are counted as nccl-tests count them: of the whole vector for allreduce, broadcast, reduce and
sendrecv; of all blocks together for the others.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfreduce import _native
from hfreduce.perf import oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from fractions import Fraction

    from hfreduce.perf.formats import Format

__all__ = ["COLLECTIVES", "Collective", "Pages", "Shape", "Workload"]

_CODES = {
    "sum": _native.SUM,
    "prod": _native.PRODUCT,
    "min": _native.MIN,
    "max": _native.MAX,
    "avg": _native.AVG,
    "band": _native.BAND,
    "bor": _native.BOR,
    "bxor": _native.BXOR,
}


@dataclass(frozen=True, slots=True)
class Collective:
    """Properties of one collective for the table."""

    name: str
    reduces: bool
    """Whether it combines values, so that the operation matters."""
    rooted: bool
    split: bool
    """Whether its size is that of the blocks of all ranks together."""
    bus_factor: Callable[[int], float]
    """Bus bandwidth over algorithm bandwidth, by number of ranks (nccl-tests' PERFORMANCE.md)."""
    traffic: Callable[[int, int], float]
    """Bytes that must be read and written in a machine's memory, for each byte of the size:
    (ranks on the machine, all ranks)."""


def _ring_share(ranks: int) -> float:
    return (ranks - 1) / ranks


COLLECTIVES = {
    each.name: each
    for each in (
        Collective(
            "allreduce",
            reduces=True,
            rooted=False,
            split=False,
            bus_factor=lambda n: 2 * _ring_share(n),
            traffic=lambda n_bytes, _: 2 * n_bytes,
        ),
        Collective(
            "broadcast",
            reduces=False,
            rooted=True,
            split=False,
            bus_factor=lambda _: 1.0,
            traffic=lambda n_bytes, _: n_bytes,
        ),
        Collective(
            "reduce",
            reduces=True,
            rooted=True,
            split=False,
            bus_factor=lambda _: 1.0,
            traffic=lambda n_bytes, _: n_bytes + 1,
        ),
        Collective(
            "allgather",
            reduces=False,
            rooted=False,
            split=True,
            bus_factor=_ring_share,
            traffic=lambda n_bytes, n: n_bytes + n_bytes / n,
        ),
        Collective(
            "reduce_scatter",
            reduces=True,
            rooted=False,
            split=True,
            bus_factor=_ring_share,
            traffic=lambda n_bytes, n: n_bytes + n_bytes / n,
        ),
        Collective(
            "alltoall",
            reduces=False,
            rooted=False,
            split=True,
            bus_factor=_ring_share,
            traffic=lambda n_bytes, _: 2 * n_bytes,
        ),
        Collective(
            "gather",
            reduces=False,
            rooted=True,
            split=True,
            bus_factor=_ring_share,
            traffic=lambda n_bytes, n: 1 + n_bytes / n,
        ),
        Collective(
            "scatter",
            reduces=False,
            rooted=True,
            split=True,
            bus_factor=_ring_share,
            traffic=lambda n_bytes, n: 1 + n_bytes / n,
        ),
        Collective(
            "sendrecv",
            reduces=False,
            rooted=False,
            split=False,
            bus_factor=lambda _: 1.0,
            traffic=lambda n_bytes, _: 2 * n_bytes,
        ),
    )
}


class Pages:
    """Zeroed pages of this process."""

    def __init__(self, size_bytes: int) -> None:
        self._pages = mmap.mmap(-1, max(size_bytes, 1))
        self._first = ctypes.c_char.from_buffer(self._pages)
        self.address = ctypes.addressof(self._first)
        self.view = memoryview(self._pages)[:size_bytes]


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of the table, before it is measured."""

    collective: Collective
    kind: Format
    op: str
    root: int
    count: int
    """Elements of the vector, or of one rank's block."""
    tensors: int = 1
    """Number of tensors that one allreduce combines."""

    def size_bytes(self, ranks: int) -> int:
        """The size in the table."""
        blocks = ranks if self.collective.split else 1
        return self.count * blocks * self.kind.item_bytes


class Workload:
    """One row on one rank: its memory and its operation."""

    def __init__(
        self,
        communicator: _native.Communicator,
        shape: Shape,
        memories: tuple[Pages, Pages],
        timeout_seconds: float,
    ) -> None:
        self._communicator = communicator
        self._shape = shape
        self._rank, self._ranks = communicator.rank, communicator.world_size
        self._input, self._output = memories
        self._timeout = timeout_seconds
        self._op = _CODES[shape.op]
        self._equal = [shape.count] * self._ranks
        self._call = getattr(self, f"_{shape.collective.name}")

    def run(self) -> None:
        """One operation, until it has ended."""
        self._call()

    def prepare(self) -> None:
        """Writes this rank's data."""
        shape = self._shape
        blocks = self._ranks if shape.collective.split else 1
        size = shape.count * shape.kind.item_bytes * blocks
        oracle.fill(self._input.view[:size], shape.kind, self._data(self._rank))

    def wrong(self) -> int:
        """Number of wrong elements in this rank's result after one `run`."""
        shape, rank = self._shape, self._rank
        name, root = shape.collective.name, shape.root
        if name in ("reduce", "gather") and rank != root:
            return 0
        if name in ("allreduce", "reduce"):
            return self._differ(self._input, self._expected())
        if name == "broadcast":
            return self._differ(self._input, self._data(root))
        if name == "reduce_scatter":
            return self._differ(self._output, self._expected(), start=rank * shape.count)
        if name == "scatter":
            return self._differ(self._output, self._data(root), start=rank * shape.count)
        if name == "sendrecv":
            return self._differ(self._output, self._data((rank - 1) % self._ranks))
        start = rank * shape.count if name == "alltoall" else 0
        blocks = range(self._ranks)
        return sum(self._differ(self._output, self._data(b), start, block=b) for b in blocks)

    def _differ(
        self, memory: Pages, values: tuple[Fraction, ...], start: int = 0, block: int = 0
    ) -> int:
        size = self._shape.count * self._shape.kind.item_bytes
        view = memory.view[block * size : (block + 1) * size]
        return oracle.wrong(view, self._shape.kind, values, start)

    def _data(self, rank: int) -> tuple[Fraction, ...]:
        op = self._shape.op if self._shape.collective.reduces else "max"
        return oracle.data(self._shape.kind, op, rank, self._ranks)

    def _expected(self) -> tuple[Fraction, ...]:
        return oracle.expected(self._shape.kind, self._shape.op, self._ranks)

    def _allreduce(self) -> None:
        shape = self._shape
        code, address = shape.kind.code, self._input.address
        if shape.tensors == 1:
            work = self._communicator.allreduce(
                address, shape.count, code, self._op, self._timeout, True
            )
        else:
            work = self._communicator.allreduce_many(
                self._pieces(), code, self._op, self._timeout, True
            )
        work.wait()

    def _pieces(self) -> list[tuple[int, int]]:
        shape = self._shape
        edges = [shape.count * i // shape.tensors for i in range(shape.tensors + 1)]
        step, address = shape.kind.item_bytes, self._input.address
        return [(address + a * step, b - a) for a, b in itertools.pairwise(edges)]

    def _broadcast(self) -> None:
        shape = self._shape
        self._communicator.broadcast(
            self._input.address, shape.count, shape.kind.code, shape.root, self._timeout, True
        ).wait()

    def _reduce(self) -> None:
        shape = self._shape
        self._communicator.reduce(
            self._input.address,
            shape.count,
            shape.kind.code,
            self._op,
            shape.root,
            self._timeout,
            True,
        ).wait()

    def _allgather(self) -> None:
        self._communicator.allgather(*self._both(), self._timeout, True).wait()

    def _reduce_scatter(self) -> None:
        self._communicator.reduce_scatter(*self._both(), self._op, self._timeout, True).wait()

    def _gather(self) -> None:
        self._communicator.gather(*self._both(), self._shape.root, self._timeout, True).wait()

    def _scatter(self) -> None:
        self._communicator.scatter(*self._both(), self._shape.root, self._timeout, True).wait()

    def _alltoall(self) -> None:
        self._communicator.alltoall(
            self._input.address,
            self._output.address,
            self._equal,
            self._equal,
            self._shape.kind.code,
            self._timeout,
            True,
        ).wait()

    def _sendrecv(self) -> None:
        source, target, count, code = self._both()
        after, before = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        received = self._communicator.recv(target, count, code, before, 0, self._timeout)
        self._communicator.send(source, count, code, after, 0, self._timeout).wait()
        received.wait()

    def _both(self) -> tuple[int, int, int, int]:
        shape = self._shape
        return self._input.address, self._output.address, shape.count, shape.kind.code

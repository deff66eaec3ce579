"""Oracle for a file that several clients write concurrently: the valid results of each read.

The file consists of cells, each within one chunk, so that a write of a cell is one update and is
atomic. The bytes of each write are unique. A read must return exactly one write, which has started
and which no other write has certainly replaced before the read started. A write has certainly taken
effect once it was acknowledged, or once a read that returned it has ended.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threefs

CELL_BYTES = 16 << 10
#: These cover three chunks of a mebibyte.
CELLS = 160
#: One of this many cells is never written.
HOLE_EVERY = 8
#: Cells that only one writer writes, in addition to those that all write.
OWN_CELLS = 3


@dataclass
class Write:
    """One write of a cell."""

    value: bytes
    started: float
    effective: float = float("inf")


@dataclass
class Cell:
    """The writes of one cell, which initially contains zeros."""

    writes: list[Write] = field(default_factory=lambda: [Write(bytes(CELL_BYTES), 0.0, 0.0)])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, value: bytes) -> Write:
        with self.lock:
            self.writes.append(Write(value, time.monotonic()))
            return self.writes[-1]

    def acknowledged(self, write: Write) -> None:
        with self.lock:
            write.effective = min(write.effective, time.monotonic())

    def check(self, content: bytes, started: float, where: str) -> None:
        """Check the result of a read that started at `started` and has just ended."""
        with self.lock:
            matches = [write for write in self.writes if write.value == content]
            assert matches, f"{where}: bytes of no write, or parts of several writes"
            (returned,) = matches
            replaced = [
                write
                for write in self.writes
                if returned.effective < write.started and write.effective < started
            ]
            assert not replaced, f"{where}: a write that {len(replaced)} later writes had replaced"
            returned.effective = min(returned.effective, time.monotonic())


@dataclass
class SharedFile:
    """The file, and the writes of its cells."""

    path: str
    cells: list[Cell] = field(default_factory=lambda: [Cell() for _ in range(CELLS)])

    def check(self, client: threefs.Client) -> None:
        """After all writes: each cell has its last write, or one concurrent with it."""
        started = time.monotonic()
        content = client.read_file(self.path)
        ends = [number for number, cell in enumerate(self.cells) if len(cell.writes) > 1]
        assert len(content) == (max(ends, default=-1) + 1) * CELL_BYTES
        for number in range(len(content) // CELL_BYTES):
            self.cells[number].check(cell_of(content, number), started, f"cell {number} at the end")


@dataclass
class SharedWriter:
    """Writes and reads cells of a file that other writers write, too."""

    client: threefs.Client
    file: SharedFile
    number: int
    seed: int
    operations: int = 0
    error: BaseException | None = None

    def run(self, enough: threading.Event) -> None:
        seeded = random.Random(self.seed)
        try:
            while not enough.is_set():
                self.step(seeded)
                self.operations += 1
        except BaseException as error:
            self.error = error

    def step(self, seeded: random.Random) -> None:
        if seeded.random() < 0.5:
            # Either a cell that all writers share, or one of this writer between those of others.
            contended = seeded.random() < 0.5
            number = seeded.randrange(6) if contended else self.own(seeded.randrange(OWN_CELLS))
            cell = self.file.cells[number]
            write = cell.start(seeded.randbytes(CELL_BYTES))
            self.client.batch_write([(self.file.path, number * CELL_BYTES, write.value)])
            cell.acknowledged(write)
            return
        started = time.monotonic()
        first = seeded.randrange(CELLS - 4)
        request = (self.file.path, first * CELL_BYTES, 4 * CELL_BYTES)
        (content,) = self.client.batch_read([request])
        # Missing bytes at the end count as zeros: no write there may have been acknowledged.
        for number in range(4):
            where = f"cell {first + number}"
            self.file.cells[first + number].check(cell_of(content, number), started, where)

    def own(self, index: int) -> int:
        """A cell of this writer; the cells of all writers are interleaved and none is a hole."""
        number = 6 + (self.number * OWN_CELLS + index) * 11 % (CELLS - 6)
        return number + 1 if number % HOLE_EVERY == HOLE_EVERY - 1 else number


def cell_of(content: bytes, number: int) -> bytes:
    return bytes(content[number * CELL_BYTES : (number + 1) * CELL_BYTES]).ljust(CELL_BYTES, b"\0")

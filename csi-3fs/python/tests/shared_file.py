"""One file that several clients write at once, and what a read of each place may give.

The file consists of cells, each within one chunk, so that a write of a cell is one update and takes
effect at one moment. Each write is of bytes that no other write has. A read must give one write
whole: one that has begun, and that no other write has certainly replaced before the read began. A
write has certainly taken effect once it was acknowledged, or once a read that gave it has ended.
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
#: In three chunks of a mebibyte.
CELLS = 160
#: Every so many cells one is never written.
HOLE_EVERY = 8
#: What each writer writes alone, beside what all write.
OWN_CELLS = 3


@dataclass
class Write:
    """One write of a cell."""

    value: bytes
    begun: float
    effective: float = float("inf")


@dataclass
class Cell:
    """What is known of the writes of one cell; it begins as zeros."""

    writes: list[Write] = field(default_factory=lambda: [Write(bytes(CELL_BYTES), 0.0, 0.0)])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, value: bytes) -> Write:
        with self.lock:
            self.writes.append(Write(value, time.monotonic()))
            return self.writes[-1]

    def acknowledged(self, write: Write) -> None:
        with self.lock:
            write.effective = min(write.effective, time.monotonic())

    def check(self, read: bytes, begun: float, where: str) -> None:
        """What a read gave that began at a moment and has just ended."""
        with self.lock:
            known = [write for write in self.writes if write.value == read]
            assert known, f"{where}: bytes that nobody wrote, or parts of several writes"
            (given,) = known
            replaced = [
                write
                for write in self.writes
                if given.effective < write.begun and write.effective < begun
            ]
            assert not replaced, f"{where}: a write that {len(replaced)} later ones had replaced"
            given.effective = min(given.effective, time.monotonic())


@dataclass
class SharedFile:
    """The file, and what its writers know of it."""

    path: str
    cells: list[Cell] = field(default_factory=lambda: [Cell() for _ in range(CELLS)])

    def check(self, client: threefs.Client) -> None:
        """Nothing is written any more: each cell is its last write, or one that ran beside it."""
        begun = time.monotonic()
        content = client.read_file(self.path)
        ends = [number for number, cell in enumerate(self.cells) if len(cell.writes) > 1]
        assert len(content) == (max(ends, default=-1) + 1) * CELL_BYTES
        for number in range(len(content) // CELL_BYTES):
            self.cells[number].check(cell_of(content, number), begun, f"cell {number} at the end")


@dataclass
class SharedWriter:
    """Writes and reads cells of the file that others write, too."""

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
            # One that all contend for, or one of its own among cells of others.
            contended = seeded.random() < 0.5
            number = seeded.randrange(6) if contended else self.own(seeded.randrange(OWN_CELLS))
            cell = self.file.cells[number]
            write = cell.begin(seeded.randbytes(CELL_BYTES))
            self.client.batch_write([(self.file.path, number * CELL_BYTES, write.value)])
            cell.acknowledged(write)
            return
        begun = time.monotonic()
        first = seeded.randrange(CELLS - 4)
        wanted = (self.file.path, first * CELL_BYTES, 4 * CELL_BYTES)
        (read,) = self.client.batch_read([wanted])
        # Beyond the end is nothing: no write of it may have been acknowledged before.
        for number in range(4):
            where = f"cell {first + number}"
            self.file.cells[first + number].check(cell_of(read, number), begun, where)

    def own(self, which: int) -> int:
        """The cells of all writers lie side by side; none is one of the holes."""
        number = 6 + (self.number * OWN_CELLS + which) * 11 % (CELLS - 6)
        return number + 1 if number % HOLE_EVERY == HOLE_EVERY - 1 else number


def cell_of(content: bytes, number: int) -> bytes:
    return bytes(content[number * CELL_BYTES : (number + 1) * CELL_BYTES]).ljust(CELL_BYTES, b"\0")

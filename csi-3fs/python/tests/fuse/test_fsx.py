"""Random operations on one file of a mount and on one of a local file system give equal results.

A failure prints the seed; `THREEFS_FSX_SEED=N pytest …` repeats exactly that run.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holding import HeldMount

LENGTH_MAX = 3 << 20
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x01, 0x02, 0x10

fallocate = ctypes.CDLL(None, use_errno=True).fallocate
fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
PIECE_MAX = 200_000


class Pair:
    """Performs the same operations on both files and compares every read."""

    def __init__(self, real: Path, model: Path, seed: int) -> None:
        self.paths = (real, model)
        self.random = random.Random(seed)
        self.log: list[str] = []
        self.files = self._open()

    def _open(self) -> tuple[int, int]:
        first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in self.paths)
        return first, second

    def both(self, text: str, real: object, model: object) -> None:
        self.log.append(text)
        assert real == model, f"{text} after {self.log[-20:]}"

    def step(self) -> None:
        name = self.random.choices(
            [
                "write",
                "read",
                "truncate",
                "reopen",
                "fsync",
                "mapread",
                "mapwrite",
                "size",
                "append",
                "punch",
                "zero",
                "allocate",
                "reserve",
            ],
            [8, 8, 3, 1, 1, 3, 3, 2, 2, 3, 2, 1, 1],
        )[0]
        getattr(self, f"do_{name}")()

    def place(self) -> tuple[int, int]:
        offset = self.random.randrange(LENGTH_MAX)
        return offset, self.random.randrange(1, min(PIECE_MAX, LENGTH_MAX - offset) + 1)

    def do_write(self) -> None:
        offset, length = self.place()
        data = self.random.randbytes(length)
        counts = [os.pwrite(file, data, offset) for file in self.files]
        self.both(f"write {offset} {length}", *counts)

    def do_append(self) -> None:
        size = os.fstat(self.files[1]).st_size
        data = self.random.randbytes(self.random.randrange(1, 5000))
        counts = [os.pwrite(file, data, size) for file in self.files]
        self.both(f"append {size} {len(data)}", *counts)

    def do_read(self) -> None:
        offset, length = self.place()
        self.both(f"read {offset} {length}", *(os.pread(it, length, offset) for it in self.files))

    def do_truncate(self) -> None:
        length = self.random.randrange(LENGTH_MAX)
        for file in self.files:
            os.ftruncate(file, length)
        self.both(f"truncate {length}", *(os.fstat(file).st_size for file in self.files))

    def do_size(self) -> None:
        self.both("size", *(path.stat().st_size for path in self.paths))

    def do_punch(self) -> None:
        offset, length = self.range_()
        self.allocate("punch", KEEP_SIZE | PUNCH_HOLE, offset, length)

    def do_zero(self) -> None:
        mode = ZERO_RANGE | self.random.choice((0, KEEP_SIZE))
        self.allocate("zero", mode, *self.range_())

    def do_allocate(self) -> None:
        self.allocate("allocate", 0, *self.range_())

    def do_reserve(self) -> None:
        self.allocate("reserve", KEEP_SIZE, *self.range_())

    def range_(self) -> tuple[int, int]:
        """Sometimes over whole chunks, and beyond the end of the file."""
        if self.random.random() < 0.3:
            return self.random.randrange(3) << 20, self.random.randrange(1, 3) << 20
        return self.place()

    def allocate(self, name: str, mode: int, offset: int, length: int) -> None:
        length = min(length, LENGTH_MAX - offset)
        for file in self.files:
            if fallocate(file, mode, offset, length) != 0:
                raise OSError(ctypes.get_errno(), f"{name} {offset} {length}")
        sizes = [os.fstat(file).st_size for file in self.files]
        self.both(f"{name} {mode:#x} {offset} {length}", *sizes)

    def do_fsync(self) -> None:
        self.both("fsync", *(os.fsync(file) for file in self.files))

    def do_reopen(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = self._open()
        self.both("reopen", *(path.read_bytes() for path in self.paths))

    def do_mapread(self) -> None:
        size = os.fstat(self.files[1]).st_size
        if size:
            offset = self.random.randrange(size)
            pieces = []
            for file in self.files:
                with mmap.mmap(file, size, access=mmap.ACCESS_READ) as memory:
                    pieces.append(memory[offset : offset + PIECE_MAX])
            self.both(f"mapped read {offset}", *pieces)

    def do_mapwrite(self) -> None:
        size = os.fstat(self.files[1]).st_size
        if size:
            offset = self.random.randrange(size)
            data = self.random.randbytes(
                self.random.randrange(1, min(PIECE_MAX, size - offset) + 1)
            )
            for file in self.files:
                with mmap.mmap(file, size) as memory:
                    memory[offset : offset + len(data)] = data
            self.both(f"mapped write {offset} {len(data)}", 0, 0)


def run(real: Path, model: Path, seed: int, steps: int) -> None:
    pair = Pair(real, model, seed)
    try:
        for _ in range(steps):
            pair.step()
        pair.do_reopen()
    except BaseException:
        print(f"THREEFS_FSX_SEED={seed}")
        raise
    finally:
        for file in pair.files:
            os.close(file)


def test_a_file_behaves_as_on_a_local_file_system(tree: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("THREEFS_FSX_SEED") or random.randrange(1 << 32))
    for number in range(2):
        run(tree / f"file-{number}", tmp_path / f"model-{number}", seed + number, 400)


def test_a_file_behaves_the_same_while_the_daemon_is_killed(
    mount: Callable[..., HeldMount], tmp_path: Path
) -> None:
    seed = int(os.environ.get("THREEFS_FSX_SEED") or random.randrange(1 << 32))
    mounted = mount()
    pair = Pair(mounted.target / "file", tmp_path / "model", seed)
    try:
        for _ in range(4):
            for _ in range(40):
                pair.step()
            mounted.respawn()
        pair.do_reopen()
    except BaseException:
        print(f"THREEFS_FSX_SEED={seed}")
        raise
    finally:
        for file in pair.files:
            os.close(file)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("write_back", [False, True], ids=["through", "behind"])
@pytest.mark.parametrize("seed", [1, 2])
def test_forty_thousand_operations(
    mount: Callable[..., HeldMount], tmp_path: Path, seed: int, write_back: bool
) -> None:
    mounted = mount("behind", write_back=True) if write_back else mount()
    steps = int(os.environ.get("THREEFS_FSX_STEPS") or 40_000)
    run(mounted.target / "file", tmp_path / "model", seed, steps)


def test_ranges_are_not_collapsed_or_inserted(tree: Path) -> None:
    with (tree / "file").open("w+b", buffering=0) as file:
        file.write(bytes(3 << 20))
        for mode in (0x08, 0x20, PUNCH_HOLE):
            assert fallocate(file.fileno(), mode, 1 << 20, 1 << 20) == -1
            assert ctypes.get_errno() == errno.EOPNOTSUPP

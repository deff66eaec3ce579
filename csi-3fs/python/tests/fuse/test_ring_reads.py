"""Many small reads through rings: of several files, over holes and chunk borders, at any depth."""

from __future__ import annotations

import errno
import os
import random
from typing import TYPE_CHECKING

import pytest
from hf3fs_fuse.io import make_ioring
from test_rings import MIB, SOON, opened, shared

if TYPE_CHECKING:
    from pathlib import Path

SLOT = 128 << 10
FORBID_HOLES = 2


def sparse(path: Path, size: int, seed: int) -> bytes:
    """A file with a hole in the middle; its content."""
    content = bytearray(random.Random(seed).randbytes(size))
    content[size // 3 : size // 2] = bytes(size // 2 - size // 3)
    with path.open("wb") as file:
        file.write(content[: size // 3])
        file.seek(size // 2)
        file.write(content[size // 2 :])
    return bytes(content)


@pytest.mark.parametrize("depth", [1, 4, 64, 300])
@pytest.mark.parametrize("in_flight_max", [0, 3])
def test_reads_of_several_files_return_their_bytes(
    tree: Path, depth: int, in_flight_max: int
) -> None:
    contents = [sparse(tree / str(number), 3 * MIB + number * 777, number) for number in range(3)]
    generator = random.Random(depth)
    with (
        shared(tree, depth * SLOT) as (memory, iov),
        opened(tree / "0", os.O_RDONLY) as a,
        opened(tree / "1", os.O_RDONLY) as b,
        opened(tree / "2", os.O_RDONLY) as c,
    ):
        ring = make_ioring(str(tree), depth, io_depth=-min(in_flight_max, depth))
        parts = [iov[number * SLOT : (number + 1) * SLOT] for number in range(depth)]

        def prepare(number: int) -> None:
            file = generator.randrange(3)
            length = generator.choice([1, 512, 4096, 5000, 70_000, SLOT])
            offset = generator.randrange(len(contents[file]) + 2000)
            part = parts[number][:length]
            memory.buf[number * SLOT : number * SLOT + length] = b"x" * length
            ring.prepare(part, True, (a, b, c)[file], offset, (number, file, offset, length))

        for number in range(depth):
            prepare(number)
        prepared, returned = depth, 0
        ring.submit()
        while returned < prepared:
            results = ring.wait(min_results=1, timeout=SOON)
            assert results
            for done in results:
                number, file, offset, length = done.userdata
                expected = contents[file][offset : offset + length]
                at = number * SLOT
                assert done.result == len(expected)
                assert bytes(memory.buf[at : at + len(expected)]) == expected
                if prepared < 1500:
                    prepare(number)
                    prepared += 1
            returned += len(results)
            ring.submit()


def test_small_reads_of_holes_are_refused_on_request(tree: Path) -> None:
    content = os.urandom(62 * 4096)
    (tree / "f").write_bytes(content)
    os.truncate(tree / "f", 16 * MIB)
    with shared(tree, 64 * 4096) as (memory, iov), opened(tree / "f", os.O_RDONLY) as fd:
        ring = make_ioring(str(tree), 64, flags=FORBID_HOLES)
        # Behind the data of its chunk, and in a chunk that was never written.
        offsets = [*range(0, len(content), 4096), 70 * 4096, 15 * MIB]
        for number, offset in enumerate(offsets):
            ring.prepare(iov[number * 4096 : (number + 1) * 4096], True, fd, offset, offset)
        results = ring.submit().wait(min_results=64, timeout=SOON)
        assert sorted(done.userdata for done in results) == offsets
        for done in results:
            offset, at = done.userdata, done.base_off
            if offset < len(content):
                assert done.result == 4096
                assert bytes(memory.buf[at : at + 4096]) == content[offset : offset + 4096]
            else:
                assert done.result == -errno.ENODATA


def test_reads_after_a_truncation_end_at_the_new_end(tree: Path) -> None:
    (tree / "f").write_bytes(b"a" * MIB)
    with shared(tree, 64 * 4096) as (memory, iov), opened(tree / "f", os.O_RDWR) as fd:
        ring = make_ioring(str(tree), 64)
        for end in (MIB, 10_000, 4096, 5, 0):
            os.truncate(tree / "f", end)
            for number in range(16):
                ring.prepare(iov[number * 4096 : (number + 1) * 4096], True, fd, number * 4096)
            results = ring.submit().wait(min_results=16, timeout=SOON)
            lengths = sorted(done.result for done in results)
            assert lengths == sorted(max(0, min(4096, end - number * 4096)) for number in range(16))
            for done in results:
                at = done.base_off
                assert bytes(memory.buf[at : at + done.result]) == b"a" * done.result

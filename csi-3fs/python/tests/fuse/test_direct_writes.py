"""Writes of programs that open files with O_DIRECT."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holding import HeldMount

BLOCK = 4096
WRITERS = 8
FILES = 8
DIRECT = os.O_RDWR | os.O_DIRECT
SECONDS = 60


@contextmanager
def aligned(value: int) -> Iterator[mmap.mmap]:
    """A block of memory at the start of a page."""
    with mmap.mmap(-1, BLOCK) as memory:
        memory.write(bytes([value]) * BLOCK)
        yield memory


def write(path: Path, number: int, flags: int = DIRECT) -> None:
    descriptor = os.open(path, flags)
    try:
        with aligned(number) as block:
            assert os.pwrite(descriptor, block, number * BLOCK) == BLOCK
    finally:
        os.close(descriptor)


@contextmanager
def requests_of(folder: Path, mount: Path) -> Iterator[Callable[[], int]]:
    """The number of requests of a mount that the kernel waits for."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", folder], check=True)
    try:
        connection = folder / str(os.minor(mount.stat().st_dev))
        yield lambda: int((connection / "waiting").read_text())
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("write_back", [False, True])
def test_writes_to_one_file_run_concurrently(
    cluster: Any, mount: Callable[..., HeldMount], tmp_path: Path, write_back: bool
) -> None:
    tree = mount(write_back=write_back).target
    path = tree / "file"
    path.write_bytes(bytes(WRITERS * BLOCK))
    descriptors = [os.open(path, DIRECT) for _ in range(WRITERS)]

    def write_block(number: int) -> None:
        with aligned(number) as block:
            assert os.pwrite(descriptors[number], block, number * BLOCK) == BLOCK

    storage = [cluster.pid(f"storage-{number}") for number in (1, 2, 3)]
    with requests_of(tmp_path / "fusectl", tree) as waiting, ThreadPoolExecutor(WRITERS) as pool:
        for pid in storage:
            os.kill(pid, signal.SIGSTOP)
        try:
            writes = [pool.submit(write_block, number) for number in range(WRITERS)]
            cluster.wait_for(lambda: waiting() >= WRITERS, SECONDS, "concurrent writes")
        finally:
            for pid in storage:
                os.kill(pid, signal.SIGCONT)
        for each in writes:
            each.result(SECONDS)
    for descriptor in descriptors:
        os.close(descriptor)
    expected = b"".join(bytes([number]) * BLOCK for number in range(WRITERS))
    assert path.read_bytes() == expected


@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_a_page_read_during_a_direct_write_is_dropped(
    patient: tuple[Any, Callable[..., HeldMount]], tmp_path: Path, stopped: int
) -> None:
    cluster, mount = patient
    # Without a write-back cache, the kernel drops pages by the time of change as well.
    tree = mount(write_back=True).target
    paths = [tree / f"file-{number}" for number in range(FILES)]
    for path in paths:
        path.write_bytes(bytes(BLOCK))
    readers = [os.open(path, os.O_RDONLY) for path in paths]
    writers = [os.open(path, DIRECT) for path in paths]
    pid = cluster.pid(f"storage-{stopped}")
    with (
        aligned(1) as block,
        requests_of(tmp_path / "fusectl", tree) as waiting,
        ThreadPoolExecutor(2 * FILES) as pool,
    ):
        os.kill(pid, signal.SIGSTOP)
        try:
            writes = [pool.submit(os.pwrite, writer, block, 0) for writer in writers]
            cluster.wait_for(lambda: waiting() >= FILES, SECONDS, "writes that wait")
            reads = [pool.submit(os.pread, reader, BLOCK, 0) for reader in readers]
            # The other replicas answer: these pages are older than the write that is in progress.
            cluster.wait_for(
                lambda: any(read.done() for read in reads), SECONDS, "a read during the writes"
            )
            assert not any(write.done() for write in writes)
        finally:
            os.kill(pid, signal.SIGCONT)
        for each in [*writes, *reads]:
            each.result(SECONDS)
    found = [os.pread(reader, BLOCK, 0) for reader in readers]
    for descriptor in [*readers, *writers]:
        os.close(descriptor)
    assert found == [b"\x01" * BLOCK] * FILES


def test_a_mapping_and_direct_writes_see_each_other(tree_of_the_module: Path) -> None:
    path = tree_of_the_module / "mapped"
    path.write_bytes(bytes(2 * BLOCK))
    descriptor = os.open(path, DIRECT)
    with mmap.mmap(descriptor, 2 * BLOCK) as mapping, aligned(7) as block:
        assert mapping[0] == 0
        assert os.pwrite(descriptor, block, 0) == BLOCK
        assert mapping[0] == 7
        mapping[BLOCK] = 9
        mapping.flush()
        with aligned(0) as read:
            assert os.preadv(descriptor, [read], BLOCK) == BLOCK
            assert read[0] == 9
    os.close(descriptor)
    assert path.read_bytes()[:1] == b"\x07"


def test_a_direct_write_extends_the_file(tree_of_the_module: Path) -> None:
    path = tree_of_the_module / "extended"
    for number in (0, 5, 2):
        write(path, number, DIRECT | os.O_CREAT)
    content = path.read_bytes()
    assert len(content) == 6 * BLOCK
    assert {number: content[number * BLOCK] for number in range(6)} == {
        0: 0, 1: 0, 2: 2, 3: 0, 4: 0, 5: 5,
    }  # fmt: skip

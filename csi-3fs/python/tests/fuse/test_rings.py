"""Rings through `hf3fs_fuse.io`: data, several users of one file, forks, ends of processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hf3fs_fuse.io import (
    deregister_fd,
    extract_mount_point,
    ioring,
    iovec,
    make_ioring,
    make_iovec,
    register_fd,
)
from rings import shared_memory, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holding import HeldMount

MIB = 1 << 20
SOON = timedelta(seconds=60)


@contextlib.contextmanager
def shared(mount: Path, size: int) -> Iterator[tuple[SharedMemory, iovec]]:
    """Shared memory and its registration."""
    memory = SharedMemory(create=True, size=size)
    iov = make_iovec(memory, str(mount))
    memory.unlink()
    yield memory, iov
    del iov
    memory.close()


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A registered descriptor."""
    descriptor = os.open(path, flags, 0o644)
    register_fd(descriptor)
    yield descriptor
    deregister_fd(descriptor)
    os.close(descriptor)


def transfer(ring: ioring, iov: iovec, read: bool, fd: int, offset: int) -> int:
    """One I/O; its result."""
    [done] = ring.prepare(iov, read, fd, offset, "tag").submit().wait(min_results=1, timeout=SOON)
    assert done.userdata == "tag"
    assert len(done) == len(iov)
    assert done.base_off == iov.base_off
    return done.result


def test_data_goes_both_ways(tree: Path) -> None:
    assert extract_mount_point(tree / "new") == str(tree)
    assert extract_mount_point("/dev/zero") is None
    content = os.urandom(5 * MIB + 123)
    with shared(tree, 6 * MIB) as (memory, iov), opened(tree / "f", os.O_CREAT | os.O_RDWR) as fd:
        writes, reads = make_ioring(str(tree), 8, for_read=False), make_ioring(str(tree), 8)
        memory.buf[: len(content)] = content
        assert transfer(writes, iov[: len(content)], False, fd, 0) == len(content)
        assert (tree / "f").read_bytes() == content
        memory.buf[:] = bytes(len(memory.buf))
        assert transfer(reads, iov[:], True, fd, 100) == len(content) - 100
        assert bytes(memory.buf[: len(content) - 100]) == content[100:]
        assert reads.entries == 8
        assert ioring.size_for_entries(8) > 4096


def test_many_reads_are_answered_by_their_objects(tree: Path) -> None:
    blocks = [os.urandom(4096) for _ in range(512)]
    (tree / "f").write_bytes(b"".join(blocks))
    with shared(tree, 512 * 4096) as (memory, iov), opened(tree / "f", os.O_RDONLY) as fd:
        ring = make_ioring(str(tree), 512)
        for number in reversed(range(512)):
            part = iov[number * 4096 : (number + 1) * 4096]
            ring.prepare(part, True, fd, number * 4096, number)
        results = ring.submit().wait(min_results=512, timeout=SOON)
        assert sorted(done.userdata for done in results) == list(range(512))
        for done in results:
            at = done.base_off
            assert done.result == 4096
            assert bytes(memory.buf[at : at + 4096]) == blocks[done.userdata]
        assert ring.wait(timeout=timedelta(0)) == []


def test_results_that_were_not_taken_yet_keep_their_objects(tree: Path) -> None:
    """More I/Os are prepared while results of earlier ones are waiting."""
    blocks = [os.urandom(4096) for _ in range(64)]
    (tree / "f").write_bytes(b"".join(blocks))
    with shared(tree, 64 * 4096) as (memory, iov), opened(tree / "f", os.O_RDONLY) as fd:
        ring = make_ioring(str(tree), 64)
        parts = [iov[number * 4096 : (number + 1) * 4096] for number in range(64)]
        for number in range(64):
            ring.prepare(parts[number], True, fd, number * 4096, (number, number))
        in_flight, prepared = 64, 64
        ring.submit()
        while in_flight:
            results = ring.wait(max_results=3, min_results=1, timeout=SOON)
            assert results, f"{in_flight} results are missing"
            in_flight -= len(results)
            for done in results:
                part, block = done.userdata
                at = done.base_off
                assert (at, done.result) == (part * 4096, 4096)
                assert bytes(memory.buf[at : at + 4096]) == blocks[block]
                if prepared < 1000:
                    block = prepared * 7 % 64
                    ring.prepare(parts[part], True, fd, block * 4096, (part, block))
                    prepared, in_flight = prepared + 1, in_flight + 1
            ring.submit()


def test_wrong_calls_are_refused_with_an_errno(tree: Path, tmp_path: Path) -> None:
    (tree / "f").write_bytes(b"data")
    with shared(tree, 4096) as (_, iov), opened(tree / "f", os.O_RDONLY) as fd:
        reads, writes = make_ioring(str(tree), 2), make_ioring(str(tree), 2, for_read=False)
        expect(errno.EACCES, writes.prepare, iov, False, fd, 0)
        expect(errno.EBADF, reads.prepare, iov, True, fd + 100, 0)
        expect(errno.EINVAL, reads.prepare, iov[:0], True, fd, 0)
        expect(errno.EINVAL, register_fd, fd)
        with pytest.raises(ValueError, match="a write in a ring for reads"):
            reads.prepare(iov, False, fd, 0)
        with pytest.raises(IndexError, match="step of 1"):
            iov[::2]
        reads.prepare(iov, True, fd, 0).prepare(iov, True, fd, 0)
        expect(errno.EAGAIN, reads.prepare, iov, True, fd, 0)
    with (tmp_path / "other").open("wb") as file:
        expect(errno.EBADF, register_fd, file.fileno())
    expect(errno.ENOENT, make_ioring, str(tmp_path), 4)
    expect(errno.EINVAL, make_ioring, str(tree), 0)
    expect(errno.EINVAL, make_ioring, str(tree), 4, flags=8)


def expect(number: int, call: Callable[..., object], *arguments: object, **more: object) -> None:
    with pytest.raises(OSError) as error:
        call(*arguments, **more)
    assert error.value.errno == number


def test_two_rings_share_one_memory(tree: Path) -> None:
    (tree / "a").write_bytes(b"a" * MIB)
    (tree / "b").write_bytes(b"b" * MIB)
    with (
        shared(tree, 2 * MIB) as (memory, iov),
        opened(tree / "a", os.O_RDONLY) as a,
        opened(tree / "b", os.O_RDONLY) as b,
    ):
        first, second = make_ioring(str(tree), 4), make_ioring(str(tree), 4)
        first.prepare(iov[:MIB], True, a, 0).submit()
        second.prepare(iov[MIB:], True, b, 0).submit()
        for ring in (first, second):
            [done] = ring.wait(min_results=1, timeout=SOON)
            assert done.result == MIB
        assert bytes(memory.buf) == b"a" * MIB + b"b" * MIB


def test_threads_have_separate_rings(tree: Path) -> None:
    content = os.urandom(2 * MIB)
    (tree / "f").write_bytes(content)
    wrong: list[object] = []

    def work(seed: int) -> None:
        with shared(tree, 65536) as (memory, iov), opened(tree / "f", os.O_RDONLY) as fd:
            ring = make_ioring(str(tree), 4)
            for round_ in range(40):
                offset = (seed * 7919 + round_ * 104729) % (2 * MIB - 65536)
                result = transfer(ring, iov, True, fd, offset)
                if bytes(memory.buf[:result]) != content[offset : offset + 65536]:
                    wrong.append((seed, round_))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_daemon_is_replaced_during_reads_and_writes(
    mount: Callable[..., HeldMount],
) -> None:
    """Programs see no error, and every acknowledged byte is there."""
    held = mount()
    tree = held.target
    block = 256 << 10
    stop = threading.Event()
    failed: list[object] = []
    digests: dict[int, bytes] = {}

    def work() -> None:
        try:
            with (
                shared(tree, 8 * block) as (memory, iov),
                opened(tree / "f", os.O_CREAT | os.O_RDWR) as fd,
            ):
                writes = make_ioring(str(tree), 8, for_read=False)
                reads = make_ioring(str(tree), 8)
                round_ = 0
                while not stop.is_set() or round_ < 3:
                    data = os.urandom(8 * block)
                    memory.buf[:] = data
                    for number in range(8):
                        part = iov[number * block : (number + 1) * block]
                        writes.prepare(part, False, fd, (round_ % 4 * 8 + number) * block)
                    results = writes.submit().wait(min_results=8, timeout=SOON)
                    assert [done.result for done in results] == [block] * 8
                    digests[round_ % 4] = hashlib.sha256(data).digest()
                    memory.buf[:] = bytes(8 * block)
                    assert transfer(reads, iov, True, fd, round_ % 4 * 8 * block) == 8 * block
                    assert bytes(memory.buf) == data
                    round_ += 1
        except BaseException as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(5):
        wait_for(lambda: len(digests) >= 2 or failed, 60)
        held.respawn()
        digests_before = dict(digests)
        wait_for(lambda before=digests_before: digests != before or failed, 60)
    stop.set()
    worker.join(120)
    assert not failed
    assert not worker.is_alive()
    with (tree / "f").open("rb") as file:
        for number, digest in digests.items():
            file.seek(number * 8 * block)
            assert hashlib.sha256(file.read(8 * block)).digest() == digest


PROGRAM = """
import os, sys, signal
from multiprocessing.shared_memory import SharedMemory
from hf3fs_fuse.io import *
mount = sys.argv[1]
memory = SharedMemory(create=True, size=1 << 20)
iov = make_iovec(memory, mount)
memory.unlink()
ring = make_ioring(mount, 64, for_read=False)
fd = os.open(mount + "/f", os.O_CREAT | os.O_RDWR)
register_fd(fd)
for number in range(64):
    ring.prepare(iov, False, fd, number << 20)
ring.submit()
sys.path.append(sys.argv[3])
from rings import shared_memory
print(*shared_memory(int(sys.argv[4])), flush=True)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "fork"])
def test_a_killed_process_leaves_nothing_behind(mount: Callable[..., HeldMount], end: str) -> None:
    """In the middle of its I/O; also if a child continues to run, which inherited descriptors."""
    held = mount()
    assert not shared_memory(held.pid)
    arguments = [str(held.target), end, str(Path(__file__).parent), str(held.pid)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE, text=True)
    try:
        assert process.wait(60) == -signal.SIGKILL
        wait_for(lambda: not shared_memory(held.pid), 60)
        assert process.stdout is not None
        names = process.stdout.readline().split()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert len(names) == 2
    assert not [name for name in names if Path(name).exists()]
    assert (held.target / "f").stat().st_size <= 64 * MIB
    (held.target / "f").unlink()


def test_a_forked_child_makes_its_own_rings(tree: Path) -> None:
    (tree / "f").write_bytes(b"data")
    with shared(tree, 4096) as (memory, iov), opened(tree / "f", os.O_RDONLY) as fd:
        ring = make_ioring(str(tree), 4)
        results = multiprocessing.get_context("fork").SimpleQueue()

        def child() -> None:
            try:
                ring.prepare(iov, True, fd, 0)
            except OSError as error:
                results.put(error.errno)
            with shared(tree, 4096) as (own, own_iov):
                result = transfer(make_ioring(str(tree), 4), own_iov, True, fd, 0)
                results.put(bytes(own.buf[:result]))

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert results.get() == errno.EPERM
        assert results.get() == b"data"
        assert transfer(ring, iov, True, fd, 0) == 4
        assert bytes(memory.buf[:4]) == b"data"


def test_a_file_stays_usable_after_it_was_removed(tree: Path) -> None:
    (tree / "f").write_bytes(b"data")
    with shared(tree, 4096) as (_, iov), opened(tree / "f", os.O_RDONLY) as fd:
        ring = make_ioring(str(tree), 4)
        (tree / "f").unlink()
        assert transfer(ring, iov, True, fd, 0) == 4


def test_a_mount_with_a_write_back_cache_has_no_rings(mount: Callable[..., HeldMount]) -> None:
    tree = mount(write_back=True).target
    assert extract_mount_point(tree) is None
    expect(errno.ENOENT, make_ioring, str(tree), 4)


def test_a_read_only_mount_has_rings_for_reads(mount: Callable[..., HeldMount]) -> None:
    (mount().target / "f").write_bytes(b"data")
    tree = mount(read_only=True).target
    expect(errno.EROFS, make_ioring, str(tree), 4, for_read=False)
    with shared(tree, 4096) as (memory, iov), opened(tree / "f", os.O_RDONLY) as fd:
        assert transfer(make_ioring(str(tree), 4), iov, True, fd, 0) == 4
        assert bytes(memory.buf[:4]) == b"data"

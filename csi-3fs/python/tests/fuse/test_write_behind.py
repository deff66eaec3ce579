"""Writes that a mount answers before they are durable: none is lost or seems to be missing."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import threefs
    from holding import HeldMount

MIB = 1 << 20


@pytest.fixture
def stopped_storage(
    patient: tuple[Any, Callable[..., HeldMount]],
) -> Iterator[tuple[HeldMount, Callable[[], None], threefs.Client]]:
    """A mount of a cluster whose storage services are stopped, and what continues them."""
    cluster, mount = patient
    mounted = mount(timeout_seconds=20)
    (mounted.target / "warm").write_bytes(b"x" * MIB * 12)
    services = [cluster.pid(f"storage-{number}") for number in (1, 2, 3)]
    running = [True]

    def resume() -> None:
        if not running[0]:
            running[0] = True
            for pid in services:
                os.kill(pid, signal.SIGCONT)

    def stop() -> None:
        running[0] = False
        for pid in services:
            os.kill(pid, signal.SIGSTOP)

    stop()
    with cluster.client() as client:
        try:
            yield mounted, resume, client
        finally:
            resume()


def test_pending_bytes_are_visible_on_their_mount_and_durable_after_fsync(
    stopped_storage: tuple[HeldMount, Callable[[], None], threefs.Client],
) -> None:
    mounted, resume, client = stopped_storage
    path = mounted.target / "file"
    content = os.urandom(3 * MIB + 17)
    with path.open("w+b", buffering=0) as file:
        assert file.write(content) == len(content)
        assert path.stat().st_size == len(content)
        assert os.fstat(file.fileno()).st_size == len(content)
        assert next(it for it in os.scandir(mounted.target) if it.name == "file").stat().st_size
        synced = threading.Thread(target=os.fsync, args=(file.fileno(),))
        synced.start()
        synced.join(0.5)
        assert synced.is_alive(), "the services do not respond"
        resume()
        synced.join(60)
        assert not synced.is_alive()
        assert client.read_file(f"{mounted.root}/file") == content


@pytest.mark.parametrize("operation", ["read", "truncate", "punch", "seek", "lock", "direct"])
def test_operations_wait_for_the_bytes_that_they_depend_on(
    stopped_storage: tuple[HeldMount, Callable[[], None], threefs.Client], operation: str
) -> None:
    mounted, resume, client = stopped_storage
    path = mounted.target / "file"
    content = bytearray(os.urandom(2 * MIB))
    with path.open("w+b", buffering=0) as file:
        file.write(content)
        timer = threading.Timer(0.3, resume)
        timer.start()
        match operation:
            case "read":
                # Not from the pages of the kernel.
                direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
                assert os.pread(direct, 4096, MIB) == content[MIB : MIB + 4096]
                os.close(direct)
            case "truncate":
                file.truncate(MIB)
                del content[MIB:]
            case "punch":
                _punch(file.fileno(), 4096, 8192)
                content[4096 : 4096 + 8192] = bytes(8192)
            case "seek":
                assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == len(content)
            case "lock":
                fcntl.lockf(file, fcntl.LOCK_EX)
            case "direct":
                direct = os.open(path, os.O_WRONLY)
                fcntl.fcntl(direct, fcntl.F_SETFL, os.O_DIRECT)
                os.pwrite(direct, b"d" * 4096, 4096)
                content[4096:8192] = b"d" * 4096
                os.close(direct)
        timer.join()
        os.fsync(file.fileno())
    assert client.read_file(f"{mounted.root}/file") == content


def _punch(file: int, offset: int, length: int) -> None:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if library.fallocate(file, 1 | 2, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def test_a_killed_daemon_leaves_its_pending_bytes_to_the_next(
    stopped_storage: tuple[HeldMount, Callable[[], None], threefs.Client],
) -> None:
    mounted, resume, client = stopped_storage
    content = bytearray(4 * MIB)
    descriptor = os.open(mounted.target / "file", os.O_CREAT | os.O_RDWR)
    for offset, length in ((0, MIB), (MIB + 5, 100), (MIB + 105, 3000), (3 * MIB, 77), (0, 50)):
        part = os.urandom(length)
        assert os.pwrite(descriptor, part, offset) == length
        content[offset : offset + length] = part
    del content[3 * MIB + 77 :]
    for _ in range(2):
        mounted.respawn()
        assert os.fstat(descriptor).st_size == len(content)
    resume()
    os.fsync(descriptor)
    assert client.read_file(f"{mounted.root}/file") == content
    os.close(descriptor)
    assert (mounted.target / "file").read_bytes() == content


def test_a_file_whose_services_do_not_respond_does_not_stop_others(
    stopped_storage: tuple[HeldMount, Callable[[], None], threefs.Client],
) -> None:
    """Writes wait once a file has as many pending pieces as it can have."""
    mounted, resume, client = stopped_storage
    content = os.urandom(40 * MIB)
    written = threading.Event()

    def write() -> None:
        (mounted.target / "large").write_bytes(content)
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not written.wait(0.5)
    with (mounted.target / "small").open("wb", buffering=0) as small:
        small.write(b"fits")
        resume()
    writer.join(60)
    assert written.is_set()
    assert client.read_file(f"{mounted.root}/large") == content
    assert client.read_file(f"{mounted.root}/small") == b"fits"


def test_a_write_that_fails_later_is_reported_by_fsync_or_close_once(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    from conftest import mounts

    cluster = start_cluster("small", "--capacity", "64M")
    with cluster.client() as client, mounts(cluster, client, tmp_path) as mount:
        target = mount(timeout_seconds=60).target
        block = os.urandom(MIB)
        for ends in ("fsync", "close"):
            descriptor = os.open(target / ends, os.O_CREAT | os.O_WRONLY)
            failed = []
            try:
                for _ in range(200):
                    os.write(descriptor, block)
                if ends == "fsync":
                    os.fsync(descriptor)
            except OSError as error:
                failed.append(error.errno)
            try:
                os.close(descriptor)
            except OSError as error:
                failed.append(error.errno)
            assert failed, "200 MiB do not fit"
            assert set(failed) == {errno.ENOSPC}


def test_small_writes_in_order_survive_kills_of_the_daemon(
    mount: Callable[..., HeldMount], client: threefs.Client
) -> None:
    mounted = mount()
    stop, random_source = threading.Event(), random.Random(7)
    contents: dict[str, bytearray] = {}
    problems: list[BaseException] = []

    def write(name: str) -> None:
        content = contents[name] = bytearray()
        try:
            with (mounted.target / name).open("wb", buffering=0) as file:
                while not stop.is_set() and len(content) < 8 * MIB:
                    part = random_source.randbytes(random_source.choice((1, 100, 4096, 70_000)))
                    file.write(part)
                    content += part
                    if random_source.random() < 0.01 and len(content) > 5000:
                        # Bytes that were written before, perhaps still pending.
                        file.seek(len(content) - 5000)
                        file.write(part[:900])
                        start = len(content) - 5000
                        content[start : start + len(part[:900])] = part[:900]
                        file.seek(len(content))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(f"f{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        stop.wait(0.3)
        mounted.respawn()
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems
    for name, content in contents.items():
        assert content, "nothing was written"
        assert client.read_file(f"{mounted.root}/{name}") == content

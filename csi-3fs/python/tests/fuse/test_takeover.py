"""The daemon dies, hangs, or has no cluster: programs continue or fail, and none hangs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from threefs.mount import unmount

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holding import HeldMount


def test_a_reader_gets_all_bytes_and_no_error(mount: Callable[..., HeldMount]) -> None:
    mounted = mount()
    content = os.urandom(1 << 20) * 16
    path = mounted.target / "file"
    path.write_bytes(content)
    stop, reads, problems = threading.Event(), [0], list[BaseException]()

    def reader() -> None:
        try:
            while not stop.is_set():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                with os.fdopen(descriptor, "rb", buffering=0) as file:
                    content_read = bytearray()
                    while part := file.read(1 << 20):
                        content_read += part
                assert content_read == content
                reads[0] += 1
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    for _ in range(5):
        time.sleep(0.1)
        mounted.respawn()
        assert mounted.ready["resumed"]
        assert mounted.ready["resent"]
    before = reads[0]
    deadline = time.monotonic() + 60
    while reads[0] <= before and not problems and time.monotonic() < deadline:
        time.sleep(0.02)
    stop.set()
    thread.join()
    assert not problems, problems
    assert reads[0] > before


def test_pending_changes_are_executed_once(mount: Callable[..., HeldMount]) -> None:
    mounted = mount()
    tree = mounted.target
    problems: list[BaseException] = []
    stopped = threading.Event()
    expected: set[str] = set()

    def create() -> None:
        try:
            number = 0
            while not stopped.is_set():
                name = f"d-{number}"
                os.mkdir(tree / name)
                os.rename(tree / name, tree / f"moved-{number}")
                descriptor = os.open(tree / "x", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                os.write(descriptor, b"x" * 100)
                os.close(descriptor)
                os.link(tree / "x", tree / f"link-{number}")
                os.unlink(tree / "x")
                expected.update({f"moved-{number}", f"link-{number}"})
                number += 1
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    for _ in range(6):
        time.sleep(0.15)
        mounted.respawn()
    stopped.set()
    thread.join()
    assert not problems, problems
    assert set(os.listdir(tree)) == expected
    for name in expected:
        if name.startswith("link-"):
            assert (tree / name).read_bytes() == b"x" * 100


def test_written_data_of_an_open_file_survives_a_kill(
    mount: Callable[..., HeldMount], client: Any
) -> None:
    mounted = mount()
    client.set_quota(mounted.root, 100 << 20, None)
    content = os.urandom(3_000_001)
    with open(mounted.target / "file", "w+b", buffering=0) as file:
        file.write(content)
        mounted.respawn()
        file.seek(0)
        assert file.read() == content
        file.write(b"more")
        mounted.respawn()
        os.fsync(file.fileno())
        assert client.read_file(f"{mounted.root}/file") == content + b"more"
        os.unlink(mounted.target / "file")
        mounted.respawn()
        file.seek(0)
        assert file.read() == content + b"more"
    deadline = time.monotonic() + 60
    while client.quota(mounted.root).bytes_used and time.monotonic() < deadline:
        time.sleep(0.1)
    assert client.quota(mounted.root).bytes_used == 0, "bytes stay reserved"


KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x01, 0x02, 0x10

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def fallocate(file: int, mode: int, offset: int, length: int) -> None:
    if _fallocate(file, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), f"fallocate {mode:#x} {offset} {length}")


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "behind"])
def test_holes_and_truncations_of_an_open_file_survive_a_kill(
    mount: Callable[..., HeldMount], client: Any, write_back: bool
) -> None:
    mounted = mount("cut", write_back=write_back)
    content = bytearray(os.urandom(3 << 20))
    with open(mounted.target / "file", "w+b", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
        fallocate(file.fileno(), PUNCH_HOLE | KEEP_SIZE, 100_000, 1_500_000)
        content[100_000:1_600_000] = bytes(1_500_000)
        mounted.respawn()
        assert os.pread(file.fileno(), 3 << 20, 0) == content
        os.ftruncate(file.fileno(), 2_000_001)
        fallocate(file.fileno(), ZERO_RANGE, 1_900_000, 500_000)
        content[1_900_000:] = bytes(500_000)
        mounted.respawn()
        assert os.fstat(file.fileno()).st_size == 2_400_000
        assert os.pread(file.fileno(), 3 << 20, 0) == content
        os.pwrite(file.fileno(), b"x" * 10_000, 2_395_000)
        content[2_395_000:] = b"x" * 10_000
        fallocate(file.fileno(), PUNCH_HOLE | KEEP_SIZE, 2_399_000, 5_000)
        content[2_399_000:2_404_000] = bytes(5_000)
        mounted.respawn()
        os.fsync(file.fileno())
        assert client.read_file(f"{mounted.root}/file") == content


def test_a_hole_needs_no_metadata_service(
    mount: Callable[..., HeldMount], cluster: Any, client: Any
) -> None:
    """Like any write: its time is reported at the close."""
    mounted = mount(timeout_seconds=30)
    with open(mounted.target / "file", "w+b", buffering=0) as file:
        file.write(b"x" * 2_000_000)
        os.fsync(file.fileno())
        meta = cluster.kill("meta", signal.SIGSTOP)
        try:
            fallocate(file.fileno(), PUNCH_HOLE | KEEP_SIZE, 10, 1_500_000)
            fallocate(file.fileno(), ZERO_RANGE, 1_900_000, 100_000)
        finally:
            os.kill(meta, signal.SIGCONT)
        before = os.stat(mounted.target / "file").st_mtime_ns
        os.fsync(file.fileno())
        assert os.stat(mounted.target / "file").st_mtime_ns >= before
    expected = b"x" * 10 + bytes(1_500_000) + b"x" * 399_990 + bytes(100_000)
    assert client.read_file(f"{mounted.root}/file") == expected


def test_data_that_a_new_daemon_could_not_report_is_found_when_the_file_is_opened(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """Storage is stopped when the daemon is replaced, so the end of the file cannot be queried."""
    from holding import start_mount

    cluster = start_cluster()
    mounted = start_mount(cluster.file, "/", tmp_path, 0, timeout_seconds=10)
    content = os.urandom(3_000_000)
    names = ["file", "cut"]
    descriptors = [os.open(mounted.target / name, os.O_RDWR | os.O_CREAT) for name in names]
    try:
        meta = cluster.kill("meta", signal.SIGSTOP)
        for descriptor in descriptors:
            assert os.pwrite(descriptor, content, 0) == len(content)
        mounted.signal(signal.SIGKILL)
        storage = [name for name in cluster.status_file()["pids"] if name.startswith("storage")]
        stopped = [cluster.kill(name, signal.SIGSTOP) for name in storage]
        os.kill(meta, signal.SIGCONT)
        mounted.respawn()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        cluster.wait_whole()
        with (mounted.target / "file").open("r+b") as file:
            assert file.read() == content
        os.truncate(mounted.target / "cut", 1_000_000)
        assert (mounted.target / "cut").read_bytes() == content[:1_000_000]
        with cluster.client() as client:
            assert client.read_file("/file") == content
            assert client.read_file("/cut") == content[:1_000_000]
    finally:
        mounted.close()
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def test_a_listing_continues_after_a_kill(mount: Callable[..., HeldMount]) -> None:
    mounted = mount()
    names = {f"entry-{number:04}" for number in range(600)}
    for name in names:
        (mounted.target / name).touch()
    listed = []
    with os.scandir(mounted.target) as entries:
        for number, entry in enumerate(entries):
            listed.append(entry.name)
            if number == 200:
                mounted.respawn()
    assert sorted(listed) == sorted(names)


def test_a_terminated_daemon_is_replaced(mount: Callable[..., HeldMount]) -> None:
    mounted = mount()
    with open(mounted.target / "file", "w+b", buffering=0) as file:
        file.write(b"before")
        mounted.signal(signal.SIGTERM)
        assert mounted.wait() == 0
        mounted.respawn()
        file.write(b" and after")
    assert (mounted.target / "file").read_bytes() == b"before and after"
    assert mounted.ready["generation"] == 2


def test_unmounting_does_not_wait_for_a_stopped_daemon(mount: Callable[..., HeldMount]) -> None:
    mounted = mount()
    (mounted.target / "file").write_bytes(b"x" * 100_000)
    mounted.signal(signal.SIGSTOP)
    reader = _reader(mounted.target / "new name")
    started = time.monotonic()
    unmount(mounted.target)
    assert time.monotonic() - started < 30
    assert reader.wait(30) != 0
    mounted.signal(signal.SIGCONT)
    mounted.wait()


def test_without_a_cluster_operations_time_out_and_unmounting_is_fast(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    from holding import start_mount

    cluster = start_cluster()
    mounted = start_mount(cluster.file, "/", tmp_path, 0, timeout_seconds=10)
    target = mounted.target
    (target / "file").write_bytes(b"x" * 3_000_000)
    descriptor = os.open(target / "file", os.O_RDWR)
    try:
        cluster.stop()
        started = time.monotonic()
        with pytest.raises(OSError, match="timed out") as excinfo:
            os.mkdir(target / "directory")
        assert excinfo.value.errno == errno.ETIMEDOUT
        os.pwrite(descriptor, b"y" * 100, 0)
        with pytest.raises(OSError, match="timed out"):
            os.fsync(descriptor)
        assert time.monotonic() - started < 60
        # A signal ends a wait before the operation does.
        reader = _reader(target / "other")
        reader.kill()
        reader.wait(30)
    finally:
        started = time.monotonic()
        unmount(target)
        assert time.monotonic() - started < 30
        mounted.close()
    with pytest.raises(OSError, match=r"connected|abort"):
        os.pread(descriptor, 10, 0)
    with contextlib.suppress(OSError):
        os.close(descriptor)
    log = (tmp_path / "daemon-0.log").read_text()
    assert "meta at" in log
    assert "chain" in log or "target" in log, log


def _reader(path: Path) -> subprocess.Popen[bytes]:
    script = "import os,sys; os.stat(sys.argv[1])"
    return subprocess.Popen([sys.executable, "-c", script, str(path)], stderr=subprocess.DEVNULL)

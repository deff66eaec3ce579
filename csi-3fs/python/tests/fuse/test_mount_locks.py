"""Locks of fcntl and flock over two mounts of one directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from locking import PATIENCE_SECONDS, Process, waits
from rings import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holding import HeldMount

LEASE_SECONDS = 30.0


@pytest.fixture
def process() -> Iterator[Callable[[], Process]]:
    """Start processes; they end with the test."""
    processes: list[Process] = []

    def start() -> Process:
        processes.append(Process())
        return processes[-1]

    yield start
    for running in processes:
        with contextlib.suppress(ProcessLookupError):
            running.end()


def pair(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> tuple[tuple[HeldMount, Process, str], tuple[HeldMount, Process, str]]:
    """Two mounts of one directory, with one process and the path of a file each."""
    first, second = mount("same"), mount("same")
    (first.target / "file").write_bytes(bytes(100))
    sides = []
    for side in (first, second):
        running, path = process(), str(side.target / "file")
        assert running.do("open", path) is None
        sides.append((side, running, path))
    return sides[0], sides[1]


EXCLUSIVE, SHARED = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_SH | fcntl.LOCK_NB


def test_ranges_and_whole_files_are_locked_over_mounts(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    assert one.do("lockf", here, EXCLUSIVE, 10, 0) is None
    assert one.do("lockf", here, SHARED, 10, 20) is None
    assert two.do("lockf", there, EXCLUSIVE, 5, 9) == "EAGAIN"
    assert two.do("lockf", there, EXCLUSIVE, 10, 10) is None
    assert two.do("lockf", there, SHARED, 10, 20) is None
    assert two.do("lockf", there, EXCLUSIVE, 1, 25) == "EAGAIN"
    # The process of another mount is not named.
    assert two.do("getlk", there, 0, 5) == [fcntl.F_WRLCK, os.SEEK_SET, 0, 10, 0]
    assert one.do("getlk", here, 50, 0)[0] == fcntl.F_UNLCK
    # The locks of flock are independent.
    assert two.do("flock", there, SHARED) is None
    assert one.do("flock", here, SHARED) is None
    assert one.do("flock", here, EXCLUSIVE) == "EAGAIN"
    assert two.do("flock", there, fcntl.LOCK_UN) is None
    # The failed conversion has lost the lock, as on a local file system.
    assert two.do("flock", there, EXCLUSIVE) is None
    assert one.do("lockf", here, fcntl.LOCK_UN) is None
    assert two.do("lockf", there, EXCLUSIVE) is None


def test_a_lock_waits_until_the_other_mount_releases_it(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    for call in ("lockf", "flock"):
        assert one.do(call, here, fcntl.LOCK_EX) is None
        two.send(call, there, fcntl.LOCK_EX)
        wait_for(two.waits, PATIENCE_SECONDS, "the second process waits")
        assert one.do(call, here, fcntl.LOCK_UN) is None
        assert two.receive() is None
        assert one.do(call, here, EXCLUSIVE) == "EAGAIN"
        assert two.do(call, there, fcntl.LOCK_UN) is None


def test_a_file_shows_under_a_lock_what_was_written_under_another(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    sides = [(one, here), (two, there)]
    assert two.do("read", there, 8) == "\0" * 8
    for number in range(20):
        content = f"{number:08}"
        (writer, target), (reader, source) = sides[number % 2], sides[1 - number % 2]
        assert writer.do("lockf", target, fcntl.LOCK_EX) is None
        assert writer.do("write", target, content) == 8
        assert writer.do("lockf", target, fcntl.LOCK_UN) is None
        assert reader.do("lockf", source, fcntl.LOCK_SH) is None
        assert reader.do("read", source, 8) == content
        assert reader.do("lockf", source, fcntl.LOCK_UN) is None


@pytest.mark.parametrize("call", ["lockf", "flock", "ofd"])
def test_a_killed_process_loses_its_locks(
    mount: Callable[..., HeldMount], process: Callable[[], Process], call: str
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    arguments = [] if call == "ofd" else [EXCLUSIVE]
    assert one.do(call, here, *arguments) is None
    kind = "flock" if call == "flock" else "lockf"
    assert two.do(kind, there, EXCLUSIVE) == "EAGAIN"
    one.end()
    wait_for(lambda: two.do(kind, there, EXCLUSIVE) is None, PATIENCE_SECONDS, "the lock is free")


def test_a_close_of_any_descriptor_releases_the_locks_of_the_process(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (first, _, here), (_, two, there) = pair(mount, process)
    descriptor, again = os.open(here, os.O_RDWR), os.open(here, os.O_RDWR)
    fcntl.lockf(descriptor, EXCLUSIVE)
    assert two.do("lockf", there, EXCLUSIVE) == "EAGAIN"
    os.close(again)
    assert two.do("lockf", there, EXCLUSIVE) is None
    os.close(descriptor)
    # A copy of a descriptor keeps a lock of flock.
    with (first.target / "file").open("r+b") as file:
        fcntl.flock(file, EXCLUSIVE)
        os.close(os.dup(file.fileno()))
        assert two.do("flock", there, EXCLUSIVE) == "EAGAIN"
    wait_for(
        lambda: two.do("flock", there, EXCLUSIVE) is None, PATIENCE_SECONDS, "the lock is free"
    )


def test_a_signal_ends_a_wait_and_leaves_no_request(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    assert one.do("lockf", here, fcntl.LOCK_EX) is None
    two.send("lockf", there, fcntl.LOCK_EX)
    wait_for(two.waits, PATIENCE_SECONDS, "the second process waits")
    since = time.monotonic()
    two.end()
    assert time.monotonic() - since < 20.0
    assert one.do("lockf", here, fcntl.LOCK_UN) is None
    # A request that was still queued would hold it.
    assert one.do("lockf", here, EXCLUSIVE) is None


def test_processes_that_wait_for_each_other_get_an_error(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    assert one.do("lockf", here, fcntl.LOCK_EX, 10, 0) is None
    assert two.do("lockf", there, fcntl.LOCK_EX, 10, 10) is None
    one.send("lockf", here, fcntl.LOCK_EX, 10, 10)
    two.send("lockf", there, fcntl.LOCK_EX, 10, 0)
    # The request that arrives last at the metadata service closes the cycle.
    outputs = [running.process.stdout for running in (one, two)]
    first = select.select(outputs, [], [], PATIENCE_SECONDS)[0]
    sides = [(one, here, 0), (two, there, 10)]
    if first == [two.process.stdout]:
        sides.reverse()
    (refused, path, start), (other, _, _) = sides
    assert refused.receive() == "EDEADLOCK"
    assert refused.do("lockf", path, fcntl.LOCK_UN, 10, start) is None
    assert other.receive() is None


def test_locks_and_waits_survive_kills_of_the_daemons(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (first, one, here), (second, two, there) = pair(mount, process)
    assert one.do("lockf", here, fcntl.LOCK_EX) is None
    assert one.do("flock", here, fcntl.LOCK_EX) is None
    two.send("lockf", there, fcntl.LOCK_EX)
    wait_for(two.waits, PATIENCE_SECONDS, "the second process waits")
    for side in (first, second):
        side.respawn()
    assert two.waits()
    assert one.do("write", here, "more") == 4
    assert one.do("lockf", here, fcntl.LOCK_UN) is None
    assert two.receive() is None
    assert two.do("read", there, 4) == "more"
    assert two.do("flock", there, EXCLUSIVE) == "EAGAIN"
    assert one.do("lockf", here, EXCLUSIVE) == "EAGAIN"
    one.end()
    wait_for(
        lambda: two.do("flock", there, EXCLUSIVE) is None, PATIENCE_SECONDS, "the lock is free"
    )


def test_locks_and_waits_survive_kills_of_the_metadata_service(
    mount: Callable[..., HeldMount], process: Callable[[], Process], cluster: Any
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    assert one.do("lockf", here, fcntl.LOCK_EX) is None
    two.send("lockf", there, fcntl.LOCK_EX)
    wait_for(two.waits, PATIENCE_SECONDS, "the second process waits")
    for _ in range(2):
        cluster.kill("meta")
        assert one.do("flock", here, fcntl.LOCK_EX) is None
        assert one.do("flock", here, fcntl.LOCK_UN) is None
    assert one.do("write", here, "more") == 4
    assert one.do("lockf", here, fcntl.LOCK_UN) is None
    assert two.receive() is None
    assert two.do("read", there, 4) == "more"


def test_a_mount_that_does_not_renew_its_locks_loses_them_and_can_not_write(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (first, one, here), (_, two, there) = pair(mount, process)
    free = str(first.target / "free")
    assert one.do("open", free) is None
    assert one.do("lockf", here, fcntl.LOCK_EX) is None
    assert one.do("write", here, "first") == 5
    first.signal(signal.SIGSTOP)
    since = time.monotonic()
    two.send("lockf", there, fcntl.LOCK_EX)
    one.send("write", here, "later")
    assert two.receive() is None
    assert time.monotonic() - since > LEASE_SECONDS * 2 / 3, "it may still rely on its renewal"
    assert two.do("write", there, "other") == 5
    first.signal(signal.SIGCONT)
    # It waits for a renewal until the mount knows that the session has ended.
    assert one.receive() in ("EIO", "ETIMEDOUT")
    wait_for(
        lambda: one.do("lockf", here, EXCLUSIVE) != "ETIMEDOUT",
        PATIENCE_SECONDS,
        "an answer of the metadata service",
    )
    assert one.do("read", here, 5) == "EIO", "also pages that the kernel has cached"
    assert one.do("lockf", here, EXCLUSIVE) == "EIO"
    # A later daemon knows it, too.
    first.respawn()
    assert one.do("write", here, "again") == "EIO"
    assert one.do("write", free, "other files") == 11
    assert two.do("read", there, 5) == "other"
    assert two.do("lockf", there, fcntl.LOCK_UN) is None
    # Until the file is closed.
    assert one.do("close", here) is None
    wait_for(
        lambda: one.do("open", here) is None and one.do("read", here, 5) == "other",
        PATIENCE_SECONDS,
        "EIO",
    )
    assert one.do("lockf", here, EXCLUSIVE) is None
    assert one.do("write", here, "third") == 5


def test_a_mount_that_is_removed_releases_its_locks(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (first, one, here), (_, two, there) = pair(mount, process)
    assert one.do("lockf", here, fcntl.LOCK_EX) is None
    first.signal(signal.SIGKILL)
    first.respawn()
    # Also what it was not told: its process is not closed before.
    first.close()
    since = time.monotonic()
    wait_for(
        lambda: two.do("lockf", there, EXCLUSIVE) is None, PATIENCE_SECONDS, "the lock is free"
    )
    assert time.monotonic() - since < LEASE_SECONDS / 2


WRITERS = 2
ROWS = 10
WRITER = """
import sqlite3, sys
path, name, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
for row in range(rows):
    base = sqlite3.connect(path, timeout=120, isolation_level=None)
    base.execute("begin immediate")
    (count,) = base.execute("select count(*) from log").fetchone()
    base.execute("insert into log values (?, ?, ?)", (count, name, row))
    base.execute("commit")
    base.close()
"""


def test_sqlite_writers_on_two_mounts_lose_no_row(mount: Callable[..., HeldMount]) -> None:
    first, second = mount("same").target / "base", mount("same").target / "base"
    with contextlib.closing(sqlite3.connect(first)) as base:
        base.execute("create table log (number integer primary key, name text, row integer)")
        base.commit()
    writers = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WRITER, str(path), f"{number}{path}", str(ROWS)]
        )
        for number in range(WRITERS)
        for path in (first, second)
    ]
    assert [writer.wait(240) for writer in writers] == [0] * len(writers)
    for path in (first, second):
        with contextlib.closing(sqlite3.connect(path)) as base:
            assert base.execute("pragma integrity_check").fetchone() == ("ok",)
            numbers = [row[0] for row in base.execute("select number from log order by number")]
            assert numbers == list(range(len(writers) * ROWS))


def test_more_waits_than_requests_of_a_daemon_do_not_block_others(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    """A daemon executes 256 requests at once, and the one that ends the waits is one of them."""
    code = (
        "import fcntl, os, sys, threading\n"
        "path, count = sys.argv[1], int(sys.argv[2])\n"
        "def wait():\n"
        "    fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_SH)\n"
        "threads = [threading.Thread(target=wait) for _ in range(count)]\n"
        "[t.start() for t in threads]\n"
        "[t.join() for t in threads]\n"
    )
    mounted = mount()
    path = mounted.target / "file"
    path.write_bytes(b"content")
    count = 200
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-I", "-S", "-c", code, str(path), str(count)]
        waiters = [subprocess.Popen(command) for _ in range(2)]
        connection = f"/sys/fs/fuse/connections/{os.minor(path.stat().st_dev)}"
        waiting = Path(connection, "waiting")
        wait_for(lambda: int(waiting.read_text()) >= 2 * count, PATIENCE_SECONDS, "all wait")
        reader = process()
        assert reader.do("open", str(path)) is None
        assert reader.do("read", str(path), 7) == "content"
        fcntl.flock(file, fcntl.LOCK_UN)
    assert [waiter.wait(120) for waiter in waiters] == [0, 0]


def test_a_wait_that_a_signal_handler_interrupts_returns_or_continues(
    mount: Callable[..., HeldMount], process: Callable[[], Process]
) -> None:
    (_, one, here), (_, two, there) = pair(mount, process)
    assert one.do("lockf", here, fcntl.LOCK_EX) is None
    code = (
        "import errno, fcntl, os, signal, sys\n"
        "def handler(*_): raise InterruptedError(errno.EINTR, 'signal')\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "print('opened', flush=True)\n"
        "try:\n"
        "    fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "except InterruptedError:\n"
        "    sys.exit(7)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code, there]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as waiter:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == b"opened\n"
        wait_for(lambda: waits(waiter.pid), PATIENCE_SECONDS, "it waits for the lock")
        waiter.send_signal(signal.SIGALRM)
        assert waiter.wait(PATIENCE_SECONDS) == 7
    assert one.do("lockf", here, fcntl.LOCK_UN) is None
    assert two.do("lockf", there, EXCLUSIVE) is None

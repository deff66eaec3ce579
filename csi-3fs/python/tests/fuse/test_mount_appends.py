"""Appends to one file through two mounts."""

from __future__ import annotations

import fcntl
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from appending import Appender, check, records
from locking import PATIENCE_SECONDS, Process
from rings import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from holding import HeldMount

MIB = 1 << 20
CHUNKS = (40, MIB // 3, 5000, MIB // 2, 100)
"""Sizes of records that cross the bounds of chunks and of pages."""


def start(
    mounts: list[HeldMount],
    count: int,
    sizes: tuple[int, ...] = (100,),
    flags: int = os.O_WRONLY,
    first: int = 0,
    processes: int = 2,
) -> list[Appender]:
    """Processes on each mount that append to one file."""
    return [
        Appender.start(mount.target / "log", f"{side}-{number}-{first}", count, sizes, flags, first)
        for number in range(processes)
        for side, mount in enumerate(mounts)
    ]


def finish(mounts: list[HeldMount], appenders: list[Appender]) -> int:
    """Wait for the appenders and check what each mount reads; the number of failed appends."""
    for appender in appenders:
        appender.process.wait(240)
    contents = [(mount.target / "log").read_bytes() for mount in mounts]
    assert contents[0] == contents[1]
    return check(contents[0], appenders)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR], ids=["write", "read-write"])
@pytest.mark.parametrize("sizes", [(100,), (7 * 8, 4096, 33, 10_000)], ids=["fixed", "variable"])
def test_records_of_several_mounts_do_not_overwrite_each_other(
    mount: Callable[..., HeldMount], flags: int, sizes: tuple[int, ...]
) -> None:
    mounts = [mount("same"), mount("same")]
    finish(mounts, start(mounts, 100, sizes, flags))


def test_records_that_cross_chunks_are_whole(mount: Callable[..., HeldMount]) -> None:
    mounts = [mount("same"), mount("same")]
    finish(mounts, start(mounts, 15, CHUNKS))


def test_a_reader_sees_whole_records_and_no_zeros(mount: Callable[..., HeldMount]) -> None:
    mounts = [mount("same"), mount("same")]
    (mounts[0].target / "log").touch()
    appenders = start(mounts, 150, (100, 3000, 33))
    seen = [0, 0]
    while any(appender.process.poll() is None for appender in appenders):
        for side, mounted in enumerate(mounts):
            content = (mounted.target / "log").read_bytes()
            records(content)
            assert len(content) >= seen[side], "it became shorter"
            seen[side] = len(content)
    finish(mounts, appenders)


@pytest.mark.parametrize("victim", ["daemon", "meta", "storage-1"])
def test_kills_lose_and_repeat_no_record(
    mount: Callable[..., HeldMount], cluster: Any, victim: str
) -> None:
    mounts = [mount("same"), mount("same")]
    log = mounts[0].target / "log"
    log.touch()
    appenders: list[Appender] = []
    for round_number in range(3):
        before = log.stat().st_size
        batch = start(mounts, 60, (100, 4000), first=1000 * round_number)
        appenders += batch
        while log.stat().st_size == before:
            assert any(appender.process.poll() is None for appender in batch)
        if victim == "daemon":
            mounts[round_number % 2].respawn()
        else:
            cluster.kill(victim)
        assert [appender.process.wait(240) for appender in batch] == [0] * len(batch)
    failed = finish(mounts, appenders)
    assert failed == 0
    cluster.wait_whole()


def test_a_mount_that_lost_its_lease_can_not_overwrite_records(
    mount: Callable[..., HeldMount],
) -> None:
    mounts = [mount("same"), mount("same")]
    stopped = start(mounts[:1], 20, processes=1)
    assert stopped[0].process.wait(240) == 0
    mounts[0].signal(signal.SIGSTOP)
    stopped += start(mounts[:1], 5, first=100, processes=1)
    others = start(mounts[1:], 20, (70,), first=500, processes=1)
    assert others[0].process.wait(240) == 0
    mounts[0].signal(signal.SIGCONT)
    finish(mounts, stopped + others)
    assert len(others[0].appended) == 20
    # It requests the lease in a new session.
    again = start(mounts[:1], 5, first=1000, processes=1)
    finish(mounts, stopped + others + again)
    assert len(again[0].appended) == 5


def test_a_truncation_by_another_mount_leaves_no_hole(
    mount: Callable[..., HeldMount],
) -> None:
    """As programs that rotate logs do."""
    one, two = mount("same").target / "log", mount("same").target / "log"
    for number in range(4):
        writer, other = (one, two) if number % 2 else (two, one)
        with writer.open("ab", buffering=0) as log:
            log.write(b"a" * 100)
            os.truncate(other, 10)
            log.write(b"b" * 5)
            os.fsync(log)
            assert other.read_bytes() == b"a" * 10 + b"b" * 5
            os.truncate(other, 0)
            log.write(b"c")
            log.write(b"d")
        assert one.read_bytes() == two.read_bytes() == b"cd"
        os.truncate(writer, 0)


def test_truncations_get_their_turn_while_others_append(mount: Callable[..., HeldMount]) -> None:
    mounts = [mount("same"), mount("same")]
    appenders = start(mounts[:1], 200, processes=1)
    log = mounts[1].target / "log"
    wait_for(log.exists, PATIENCE_SECONDS, "the file")
    while appenders[0].process.poll() is None:
        os.truncate(log, 0)
        records(log.read_bytes())
    records(log.read_bytes())
    assert appenders[0].process.returncode == 0


def test_offsets_of_positioned_writes_do_not_matter(mount: Callable[..., HeldMount]) -> None:
    """As on Linux, also for `pwrite`; other open files of the same file are not affected."""
    one, two = mount("same").target / "log", mount("same").target / "log"
    first = os.open(one, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    second = os.open(two, os.O_RDWR | os.O_APPEND)
    plain = os.open(two, os.O_RDWR)
    assert os.pwrite(first, b"one", 0) == 3
    assert os.pwrite(second, b"two", 1) == 3
    assert os.pwrite(plain, b"O", 0) == 1
    assert os.write(first, b"three") == 5
    assert os.pread(first, 100, 0) == b"Onetwothree"
    os.fsync(first)
    for descriptor in (first, second, plain):
        os.close(descriptor)
    assert two.read_bytes() == one.read_bytes() == b"Onetwothree"


def test_a_lease_outlives_the_close_and_files_of_one_mount_are_many(
    mount: Callable[..., HeldMount],
) -> None:
    """A mount has room for 1,024 leases: the least used one is released for another file."""
    mounted, other = mount("same"), mount("same")
    for number in range(1100):
        path = mounted.target / str(number)
        with path.open("ab", buffering=0) as file:
            file.write(b"first")
    for number in (0, 1, 1099):
        with (other.target / str(number)).open("ab", buffering=0) as file:
            file.write(b"second")
        assert (other.target / str(number)).read_bytes() == b"firstsecond"


def test_appends_wait_for_no_lock_of_the_file(
    mount: Callable[..., HeldMount],
) -> None:
    one, two = mount("same").target / "log", mount("same").target / "log"
    one.touch()
    holder = Process()
    assert holder.do("open", str(one)) is None
    assert holder.do("lockf", str(one), fcntl.LOCK_EX) is None
    with two.open("ab", buffering=0) as log:
        log.write(b"there")
    with one.open("ab", buffering=0) as log:
        log.write(b"here")
    assert holder.do("lockf", str(one), fcntl.LOCK_UN) is None
    assert one.read_bytes() == b"therehere"
    holder.end()

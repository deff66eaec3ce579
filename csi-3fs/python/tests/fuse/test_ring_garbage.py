"""Rings of hostile callers: garbage is answered with errors, and no other user is affected."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import rings
from rings import COMPLETION, HEADER, SUBMISSION, Caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holding import HeldMount

ENTRIES = 64
FOR_READ = 1
MIB = 1 << 20


@pytest.fixture
def caller(tree: Path) -> Iterator[Caller]:
    caller = Caller(tree)
    yield caller
    caller.close()


class Ring:
    """A ring for reads with memory and a file, of which all parts can be wrong."""

    def __init__(self, caller: Caller, path: Path) -> None:
        path.write_bytes(b"x" * MIB)
        self.caller = caller
        identity, self.descriptor = caller.memory(rings.ring_bytes(ENTRIES))
        self.number = caller.register(identity, rings.ring_bytes(ENTRIES), ENTRIES, FOR_READ)
        identity, self.data = caller.memory(MIB)
        self.region = caller.register(identity, MIB)
        self.file = caller.register_file(os.open(path, os.O_RDONLY))
        self.tail = 0

    def run(self, submission: bytes) -> tuple[int, int]:
        """Submit the bytes of one submission; slot and result of its completion."""
        os.pwrite(self.descriptor, submission, HEADER + self.tail % ENTRIES * SUBMISSION.size)
        self.tail += 1
        self.caller.submit(self.number, self.tail)
        rings.wait_for(lambda: rings.completed(self.descriptor) >= self.tail, 60)
        slot, result = rings.completion(self.descriptor, ENTRIES, self.tail - 1)
        return slot, result

    def read(self, **wrong: int) -> int:
        """One read of 4096 bytes, with other values for some fields; its result."""
        fields = {
            "slot": 0, "region": self.region, "file": self.file, "reserved": 0,
            "memory_offset": 0, "file_offset": 0, "length": 4096, **wrong,
        }  # fmt: skip
        return self.run(SUBMISSION.pack(*fields.values()))[1]


def refused(number: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError) as error:
        call(*arguments)
    assert error.value.errno == number


def test_each_field_of_a_submission_is_checked(caller: Caller, tree: Path) -> None:
    ring = Ring(caller, tree / "f")
    writes = caller.register_file(os.open(tree / "f", os.O_WRONLY))
    assert ring.read() == 4096
    for wrong, expected in (
        ({"slot": ENTRIES}, errno.EINVAL),
        ({"slot": 0xFFFFFFFF}, errno.EINVAL),
        ({"region": 12345}, errno.EINVAL),
        ({"region": ring.number}, errno.EINVAL),
        ({"region": ring.file}, errno.EINVAL),
        ({"file": 12345}, errno.EBADF),
        ({"file": ring.region}, errno.EBADF),
        ({"file": writes}, errno.EACCES),
        ({"reserved": 1}, errno.EINVAL),
        ({"memory_offset": MIB - 4095}, errno.EINVAL),
        ({"memory_offset": 2**64 - 1}, errno.EINVAL),
        ({"length": 0}, errno.EINVAL),
        ({"length": MIB + 1}, errno.EINVAL),
        ({"length": 2**64 - 1}, errno.EINVAL),
        ({"file_offset": 2**63 - 1}, errno.EFBIG),
        ({"file_offset": 2**64 - 1}, errno.EFBIG),
    ):
        assert ring.read(**wrong) == -expected, wrong
    assert ring.read(file_offset=MIB) == 0
    assert ring.read() == 4096


def test_random_submissions_leave_the_daemon_running(
    mount: Callable[..., HeldMount],
) -> None:
    held = mount()
    caller = Caller(held.target)
    ring = Ring(caller, held.target / "f")
    dice = random.Random(17)
    near = [0, 1, 4096, MIB - 1, MIB, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    for _ in range(1500):
        if dice.random() < 0.3:
            submission = dice.randbytes(SUBMISSION.size)
        else:
            words = [dice.choice([0, 1, 2, 3, 63, 64, 2**32 - 1]) for _ in range(4)]
            submission = SUBMISSION.pack(*words, *(dice.choice(near) for _ in range(3)))
        _, result = ring.run(submission)
        assert -4096 < result <= MIB
    assert ring.read() == 4096
    caller.close()
    assert Path(f"/proc/{held.pid}").exists()


def test_announcements_out_of_range_are_refused(caller: Caller, tree: Path) -> None:
    ring = Ring(caller, tree / "f")
    refused(errno.EINVAL, caller.submit, ring.number, ENTRIES + 1)
    refused(errno.EINVAL, caller.submit, ring.number, 2**31 - 1)
    caller.submit(ring.number, 2**32 - 1)  # Before the first: nothing new.
    refused(errno.EBADF, caller.submit, ring.region, 1)
    refused(errno.EBADF, caller.submit, 12345, 1)
    assert ring.read() == 4096


def test_wrong_control_messages_are_refused(caller: Caller, tree: Path) -> None:
    size = rings.ring_bytes(ENTRIES)
    identity, descriptor = caller.memory(size)
    for entries, flags, block, length in (
        (3, 0, 0, size),
        (2 * ENTRIES, 0, 0, size),
        (1 << 17, 0, 0, size),
        (ENTRIES, 8, 0, size),
        (ENTRIES, 0, 64, size),
        (0, 0, size + 1, size),
        (0, 0, 0, 0),
        (0, 0, 0, size + 1),
        (0, 0, 0, 2**64 - 1),
    ):
        refused(errno.EINVAL, caller.register, identity, length, entries, flags, block)
    refused(errno.ENOENT, caller.register, os.urandom(16), size)
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, size)
    refused(errno.EINVAL, caller.register, identity, size)  # Not populated.
    refused(errno.EBADF, fcntl.ioctl, caller.session, rings.REMOVE, struct.pack("<II", 0, 99))
    refused(errno.EBADF, fcntl.ioctl, caller.session, rings.REMOVE, struct.pack("<II", 1, 99))
    refused(errno.EINVAL, fcntl.ioctl, caller.session, rings.REMOVE, struct.pack("<II", 2, 99))
    refused(errno.ENOTTY, fcntl.ioctl, caller.session, 0x6842, 0)
    (tree / "f").touch()
    with (tree / "f").open("rb") as file:
        refused(errno.ENOTTY, fcntl.ioctl, file.fileno(), 0x6842, 0)
        stale = bytearray(os.urandom(16) + bytes(4))
        refused(errno.ESTALE, fcntl.ioctl, file.fileno(), rings.REGISTER_FILE, stale)
        magic = bytearray(4)
        fcntl.ioctl(file.fileno(), rings.GET_MAGIC, magic)
        assert int.from_bytes(magic, "little") == 0x8F3F5FFF


def test_memory_that_disappears_is_an_error_of_the_read(caller: Caller, tree: Path) -> None:
    ring = Ring(caller, tree / "f")
    os.ftruncate(ring.data, 0)
    # The daemon's write makes the file longer again: no process has a fault.
    assert ring.read() in (4096, -errno.EFAULT)
    other = Ring(caller, tree / "g")
    os.ftruncate(ring.descriptor, 0)
    caller.submit(ring.number, ring.tail)
    refused(errno.EFAULT, caller.submit, ring.number, ring.tail + 1)
    assert other.read() == 4096


def test_a_ring_whose_memory_is_gone_does_not_hinder_others(caller: Caller, tree: Path) -> None:
    ring, other = Ring(caller, tree / "f"), Ring(caller, tree / "g")
    entry = SUBMISSION.pack(0, ring.region, ring.file, 0, 0, 0, 4096)
    for number in range(ENTRIES):
        os.pwrite(ring.descriptor, entry, HEADER + number * SUBMISSION.size)
    caller.submit(ring.number, ENTRIES)
    os.ftruncate(ring.descriptor, 0)
    assert other.read() == 4096
    assert COMPLETION.size == 16


def as_user(user: int, work: Callable[[], None]) -> None:
    """Run in a child process with another user's rights."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_users_cannot_use_what_others_registered(caller: Caller, tree: Path) -> None:
    ring = Ring(caller, tree / "f")
    private, _ = caller.memory(4096)
    readable, _ = caller.memory(4096, mode=0o666)
    (tree / "secret").write_bytes(b"secret")
    (tree / "secret").chmod(0o600)

    def work() -> None:
        intruder = Caller(tree)
        for identity in (private, readable):
            refused(errno.EPERM, intruder.register, identity, 4096)
        refused(errno.EACCES, os.open, tree / "secret", os.O_RDONLY)
        # Numbers of another session mean nothing in this one.
        refused(errno.EBADF, intruder.submit, ring.number, 1)
        own = Ring.__new__(Ring)
        identity, own.descriptor = intruder.memory(rings.ring_bytes(ENTRIES))
        own.caller, own.tail = intruder, 0
        own.number = intruder.register(identity, rings.ring_bytes(ENTRIES), ENTRIES, FOR_READ)
        own.region, own.file = ring.region, ring.file
        assert own.read() == -errno.EINVAL
        identity, _ = intruder.memory(MIB)
        own.region = intruder.register(identity, MIB)
        assert own.read(file=ring.file + 1000) == -errno.EBADF
        # A descriptor that is open for reading is registered for reading only.
        own.file = intruder.register_file(os.open(tree / "f", os.O_RDONLY))
        assert own.read() == 4096
        identity, _ = intruder.memory(rings.ring_bytes(ENTRIES))
        writes = intruder.register(identity, rings.ring_bytes(ENTRIES), ENTRIES)
        own.number, own.tail = writes, 0
        own.descriptor = os.open(intruder.names[-1], os.O_RDWR)
        assert own.read() == -errno.EACCES
        intruder.close()

    (tree / "f").chmod(0o644)
    as_user(1234, work)
    assert ring.read() == 4096


def test_a_user_has_a_limited_number_of_regions(mount: Callable[..., HeldMount]) -> None:
    held = mount()
    with Path(f"/proc/{held.pid}/limits").open() as limits:
        [line] = [line for line in limits if line.startswith("Max open files")]
    most = int(line.split()[3]) // 8
    caller = Caller(held.target)
    identity, _ = caller.memory(4096)
    numbers = [caller.register(identity, 4096) for _ in range(min(most, 20_000))]
    if most <= 20_000:
        refused(errno.EMFILE, caller.register, identity, 4096)

    def work() -> None:
        other = Caller(held.target)
        own, _ = other.memory(4096)
        other.register(own, 4096)
        other.close()

    as_user(1234, work)
    fcntl.ioctl(caller.session, rings.REMOVE, struct.pack("<II", 0, numbers[0]))
    caller.register(identity, 4096)
    caller.close()


def test_links_of_memory_belong_to_their_user(tree: Path) -> None:
    links = tree / "3fs-virt" / "iovs"
    (links / "name").symlink_to("/dev/shm/memory")
    assert [link.name for link in links.iterdir()] == ["name"]
    assert os.readlink(links / "name") == "/dev/shm/memory"
    refused(errno.EEXIST, os.symlink, "/dev/shm/other", links / "name")

    def work() -> None:
        assert list(links.iterdir()) == []
        refused(errno.ENOENT, os.unlink, links / "name")
        refused(errno.EPERM, (links / "folder").mkdir)

    as_user(1234, work)
    (links / "name").unlink()
    assert list(links.iterdir()) == []


def test_the_virtual_directory_is_not_in_listings_and_cannot_be_changed(tree: Path) -> None:
    virtual = tree / "3fs-virt"
    assert sorted(path.name for path in virtual.iterdir()) == ["iovs", "session"]
    assert "3fs-virt" not in os.listdir(tree)
    (tree / "f").touch()
    for call, arguments, expected in (
        (os.mkdir, (virtual,), errno.EEXIST),
        (os.rmdir, (virtual,), errno.EPERM),
        (os.rename, (virtual, tree / "other"), errno.EPERM),
        (os.rename, (tree / "f", virtual / "f"), errno.EPERM),
        (os.link, (tree / "f", virtual / "f"), errno.EPERM),
        (os.mkdir, (virtual / "new",), errno.EPERM),
        (os.chmod, (virtual, 0o777), errno.EPERM),
        (os.chmod, (virtual / "session", 0o777), errno.EPERM),
        (os.truncate, (virtual / "session", 1), errno.EPERM),
        (os.unlink, (virtual / "session",), errno.EPERM),
    ):
        refused(expected, call, *arguments)
    assert (virtual / "session").read_bytes() == b""
    os.statvfs(virtual)
    # Requests that the virtual directory refuses still work for files.
    os.setxattr(tree / "f", "user.a", b"1")
    assert os.getxattr(tree / "f", "user.a") == b"1"
    with (tree / "f").open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fallocate(file.fileno(), 0, 4096)
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4096

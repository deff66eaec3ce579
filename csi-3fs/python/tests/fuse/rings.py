"""The control protocol of rings, spoken by hand: what no library would send."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

REGISTER = struct.Struct("<16sQQIIIIII")
SUBMISSION = struct.Struct("<IIIIQQQ")
COMPLETION = struct.Struct("<IIq")
HEADER = 4096


def _command(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | ord("h") << 8 | number


GET_MAGIC = _command(2, 2, 4)
SESSION = _command(2, 64, 24)
REGISTER_MEMORY = _command(3, 65, REGISTER.size)
REMOVE = _command(1, 66, 8)
SUBMIT = _command(1, 67, 8)
REGISTER_FILE = _command(3, 68, 20)


class Caller:
    """A session without a library."""

    def __init__(self, mount: Path) -> None:
        self.session = os.open(mount / "3fs-virt" / "session", os.O_RDONLY)
        data = bytearray(24)
        fcntl.ioctl(self.session, SESSION, data)
        self.token = bytes(data[:16])
        self.names: list[Path] = []

    def memory(self, size: int, *, mode: int = 0o600) -> tuple[bytes, int]:
        """Create a file in /dev/shm; its id and descriptor."""
        identity = os.urandom(16)
        path = Path("/dev/shm") / f"hf3fs-iov-{identity.hex()}"
        self.names.append(path)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, mode)
        os.posix_fallocate(descriptor, 0, size)
        return identity, descriptor

    def register(
        self, identity: bytes, size: int, entries: int = 0, flags: int = 0, block: int = 0
    ) -> int:
        data = bytearray(REGISTER.pack(identity, size, block, entries, flags, 0, 0, 0, 0))
        fcntl.ioctl(self.session, REGISTER_MEMORY, data)
        return int(REGISTER.unpack(data)[7])

    def register_file(self, descriptor: int) -> int:
        data = bytearray(self.token + bytes(4))
        fcntl.ioctl(descriptor, REGISTER_FILE, data)
        return int.from_bytes(data[16:], "little")

    def submit(self, ring: int, tail: int) -> None:
        fcntl.ioctl(self.session, SUBMIT, struct.pack("<II", ring, tail & 0xFFFFFFFF))

    def close(self) -> None:
        os.close(self.session)
        for name in self.names:
            name.unlink(missing_ok=True)


def ring_bytes(entries: int) -> int:
    return HEADER + entries * (SUBMISSION.size + COMPLETION.size)


def completed(descriptor: int) -> int:
    return int.from_bytes(os.pread(descriptor, 4, 0), "little")


def completion(descriptor: int, entries: int, number: int) -> Any:
    at = HEADER + entries * SUBMISSION.size + number % entries * COMPLETION.size
    slot, _, result = COMPLETION.unpack(os.pread(descriptor, COMPLETION.size, at))
    return slot, result


def shared_memory(pid: int) -> set[Path]:
    """Files in /dev/shm that a daemon has open."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return {Path(link.removesuffix(" (deleted)")) for link in links if link.startswith("/dev/shm/")}


def wait_for(
    look: Callable[[], Any], seconds: float, condition: str = "condition not met in time"
) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)

"""Many programs write while storage is stopped: the daemon's memory is bounded."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import threefs
    from holding import HeldMount

MIB = 1 << 20
WRITERS = 800
WRITE_BYTES = MIB // 4
IN_WORK_MAX = 256
"""Requests that the daemon processes concurrently; it reads a few more to find interrupts."""
WATCHED_SECONDS = 3.0


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def test_requests_over_the_limit_wait_in_the_kernel(
    cluster: Any, client: threefs.Client, mount: Callable[..., HeldMount]
) -> None:
    mounted = mount()
    # One file per writer: the kernel sends the writes of one file one after the other.
    descriptors = [
        os.open(mounted.target / str(number), os.O_CREAT | os.O_RDWR) for number in range(WRITERS)
    ]
    problems: list[BaseException] = []

    def write(number: int) -> None:
        try:
            data = number.to_bytes(2, "little") * (WRITE_BYTES // 2)
            assert os.pwrite(descriptors[number], data, 0) == WRITE_BYTES
        except BaseException as error:
            problems.append(error)

    storage = [cluster.pid(f"storage-{number}") for number in (1, 2, 3)]
    before = resident_bytes(mounted.pid)
    in_work = IN_WORK_MAX * WRITE_BYTES
    writers = [threading.Thread(target=write, args=[number]) for number in range(WRITERS)]
    for pid in storage:
        os.kill(pid, signal.SIGSTOP)
    try:
        for writer in writers:
            writer.start()
        cluster.wait_for(
            lambda: resident_bytes(mounted.pid) - before > in_work // 2, 60, "requests in work"
        )
        deadline = time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < deadline:
            growth = resident_bytes(mounted.pid) - before
            assert growth < in_work + 16 * MIB, f"{growth >> 20} MiB of requests are in memory"
            time.sleep(0.02)
    finally:
        for pid in storage:
            os.kill(pid, signal.SIGCONT)
        for writer in writers:
            if writer.ident is not None:
                writer.join(120)
    for descriptor in descriptors:
        os.close(descriptor)
    assert not problems, problems[:3]
    for number in range(WRITERS):
        content = client.read_file(f"{mounted.root}/{number}")
        assert content == number.to_bytes(2, "little") * (WRITE_BYTES // 2), number

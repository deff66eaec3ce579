"""Random 4 KiB reads of `bench/storage.py`: through a mount, through rings, and of a local file.

None of them uses the page cache of the reading kernel: the local file is read from the disk, the
files of 3FS from the page cache of its services.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from datetime import timedelta
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING

from hf3fs_fuse.io import deregister_fd, make_ioring, make_iovec, register_fd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["steps"]

BLOCK_BYTES = 4096
SECONDS = 5
THREADS = 16
IN_FLIGHT = 256
TIMEOUT = timedelta(seconds=60)


def threads(path: Path) -> float:
    """Reads per second of threads that each wait for one read (fio, O_DIRECT)."""
    command = [
        *("fio", "--name=bench", f"--filename={path}", "--rw=randread", f"--bs={BLOCK_BYTES}"),
        *("--direct=1", "--ioengine=psync", f"--numjobs={THREADS}", "--thread"),
        *(f"--runtime={SECONDS}", "--time_based", "--group_reporting", "--output-format=json"),
    ]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return float(json.loads(result.stdout)["jobs"][0]["read"]["iops"])


def rings(path: Path, mount: Path) -> float:
    """Reads per second of one Python thread with a ring."""
    blocks = path.stat().st_size // BLOCK_BYTES
    memory = SharedMemory(create=True, size=IN_FLIGHT * BLOCK_BYTES)
    iov = make_iovec(memory, str(mount))
    memory.unlink()
    descriptor = os.open(path, os.O_RDONLY)
    register_fd(descriptor)
    ring = make_ioring(str(mount), IN_FLIGHT)
    free = [iov[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] for slot in range(IN_FLIGHT)]
    reads, in_flight, started = 0, 0, time.monotonic()
    end = started + SECONDS
    while in_flight or time.monotonic() < end:
        if time.monotonic() < end:
            for part in free:
                offset = random.randrange(blocks) * BLOCK_BYTES
                ring.prepare(part, True, descriptor, offset)
            ring.submit()
            in_flight += len(free)
        free = ring.wait(min_results=min(in_flight, IN_FLIGHT // 4), timeout=TIMEOUT)
        if not free or any(part.result != BLOCK_BYTES for part in free):
            raise RuntimeError(f"a read of `{path}` failed, or none ended within {TIMEOUT}")
        in_flight -= len(free)
        reads += len(free)
    rate = reads / (time.monotonic() - started)
    deregister_fd(descriptor)
    os.close(descriptor)
    del ring, iov, part, free
    memory.close()
    return rate


def steps(places: dict[str, Path]) -> dict[str, Callable[[], float]]:
    """The measurements, of files that `storage_mount` has written."""
    result: dict[str, Callable[[], float]] = {}
    for name in ("local", "mount"):
        label = f"{name}: 4 KiB random reads/s, {THREADS} threads"
        result[label] = partial(threads, places[name] / "file")
    label = f"rings: 4 KiB random reads/s, {IN_FLIGHT} in flight"
    result[label] = partial(rings, places["mount"] / "file", places["mount"])
    return result

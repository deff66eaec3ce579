"""Random 4 KiB reads and writes: in each directory, through rings, and what the disk allows.

None of them uses the page cache of the reading kernel: the local file is read from the disk, the
files of 3FS and its peers from the page cache of their services.
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

from bench.storage import rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["steps"]

BLOCK_BYTES = 4096
SECONDS = 4
THREADS = 16
IN_FLIGHT = 256
TIMEOUT = timedelta(seconds=60)
REPLICAS = 3
LIMIT_BYTES = 64 << 20


def threads(*paths: Path, options: tuple[str, ...], rw: str, jobs: int) -> float:
    """Operations per second of threads that each wait for one (fio), on the files in turn."""
    names = ":".join(map(str, paths))
    command = [
        *("fio", "--name=bench", f"--filename={names}", f"--rw={rw}", f"--bs={BLOCK_BYTES}"),
        *("--ioengine=psync", f"--numjobs={jobs}", "--thread", *options),
        "--file_service_type=roundrobin",
        *(f"--runtime={SECONDS}", "--time_based", "--group_reporting", "--output-format=json"),
    ]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return float(json.loads(result.stdout)["jobs"][0][rw.removeprefix("rand")]["iops"])


def limit(folder: Path) -> float:
    """Updates per second of a disk that stores each of them three times, durably, without messages.

    A thread writes and flushes its update in one file after the other, as replicas do in turn.
    """
    paths = [folder / f"limit-{replica}" for replica in range(REPLICAS)]
    for path in paths:
        if not path.exists():
            path.write_bytes(os.urandom(LIMIT_BYTES))
    writes = threads(*paths, options=("--fdatasync=1",), rw="randwrite", jobs=THREADS)
    return writes / REPLICAS


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
    """The measurements, of files that `mounts` has written."""
    result: dict[str, Callable[[], float]] = {}
    for name, folder in places.items():
        run = partial(threads, folder / "file")
        for rw, work in (("randread", "reads"), ("randwrite", "writes")):
            label = f"{name}: 4 KiB random {work}/s, {THREADS} threads"
            result[label] = partial(run, options=("--direct=1",), rw=rw, jobs=THREADS)
        for jobs, writers in ((1, "1 thread"), (8, "8 threads")):
            label = f"{name}: 4 KiB O_SYNC writes/s, {writers}"
            result[label] = partial(run, options=("--sync=1",), rw="randwrite", jobs=jobs)
    result[rows.LIMIT] = partial(limit, places["local"])
    label = f"rings: 4 KiB random reads/s, {IN_FLIGHT} in flight"
    result[label] = partial(rings, places["mount"] / "file", places["mount"])
    return result

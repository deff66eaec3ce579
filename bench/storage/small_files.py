"""Metadata and small files: stats, and creates with 4 KiB and an fsync each.

Repeated stats of a mount are answered by the kernel while its cached attributes are valid; those
of a client go to the metadata service.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import threefs

__all__ = ["client_stats", "stats", "steps", "write_files"]

BLOCK = os.urandom(4096)
THREADS = 8
FILES = 400
STAT_FILES = 25
STAT_SECONDS = 3
CLIENT_THREADS = 16


def stats(folder: Path) -> float:
    """Stats per second of threads (fio), each of its files in turn; the kernel may answer."""
    folder.mkdir(exist_ok=True)
    command = [
        *("fio", "--name=stat", f"--directory={folder}", "--ioengine=filestat", "--thread"),
        *(f"--numjobs={THREADS}", f"--nrfiles={STAT_FILES}", "--filesize=4k", "--bs=4k"),
        *(f"--runtime={STAT_SECONDS}", "--time_based", "--group_reporting"),
        "--output-format=json",
    ]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return float(json.loads(result.stdout)["jobs"][0]["read"]["iops"])


def client_stats(client: threefs.Client, path: str) -> float:
    """Stats per second of one path by threads of this process; each asks the metadata service."""
    counts = [0] * CLIENT_THREADS
    started = time.monotonic()

    def work(number: int) -> None:
        while time.monotonic() < started + STAT_SECONDS:
            client.stat(path)
            counts[number] += 1

    _run(work, CLIENT_THREADS)
    return sum(counts) / (time.monotonic() - started)


def write_files(folder: Path) -> float:
    """Files per second: created, 4 KiB written, fsync; each thread in a separate directory."""

    def work(number: int) -> None:
        own = folder / f"small-{time.monotonic_ns()}-{number}"
        own.mkdir()
        for name in range(FILES // THREADS):
            descriptor = os.open(own / str(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                os.write(descriptor, BLOCK)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    started = time.monotonic()
    _run(work, THREADS)
    return FILES // THREADS * THREADS / (time.monotonic() - started)


def _run(work: Callable[[int], None], count: int) -> None:
    """Run threads. Raises the error of one."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def steps(places: dict[str, Path]) -> dict[str, Callable[[], float]]:
    """The measurements in each directory."""
    result: dict[str, Callable[[], float]] = {}
    for name, folder in places.items():
        result[f"{name}: stats/s, {THREADS} threads"] = partial(stats, folder / "stat")
        label = f"{name}: creates with 4 KiB and fsync/s, {THREADS} threads"
        result[label] = partial(write_files, folder)
    return result

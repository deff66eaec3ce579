"""Benchmark of 3FS, fio and GlusterFS on one disk: durable writes and reads of three replicas.

A round runs every measurement once, so that a slow minute of the machine hits all of them; a figure
is the median over the rounds. Three replicas on one disk write every byte three times: the bound
of a three-replica write is a third of what three writers reach together (`fio --numjobs=3`).
Files of a mount are compared with those of a local directory and, if it is installed, of a
GlusterFS volume with three replicas.

    python -m bench.storage [--size 1G] [--rounds 3] [--output build/bench/storage.json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import threefs
from threefs.cli.output import bytes_of, describe_bytes

from bench import storage_gluster, storage_mount, storage_random
from bench.report import OUTPUT, machine, say, write_json
from bench.storage_load import TIMEOUT_SECONDS, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
PATH = "/bench"
PEER = "GlusterFS"


def fio(folder: Path, size: int, *, rw: str, jobs: int = 1) -> float:
    """Bytes per second of all jobs together: 1 MiB blocks, O_DIRECT, fdatasync at the end."""
    command = [
        *("fio", "--name=bench", f"--directory={folder}", f"--rw={rw}", f"--size={size}"),
        *(f"--bs={BLOCK_BYTES}", "--direct=1", "--ioengine=psync", f"--numjobs={jobs}"),
        *("--fdatasync=0", "--end_fsync=1", "--group_reporting", "--output-format=json"),
    ]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    job = json.loads(result.stdout)["jobs"][0]["write" if rw == "write" else "read"]
    # With several jobs fio's own rate counts from the first start to the last end.
    return float(job["bw_bytes"])


def batch_write(client: threefs.Client, size: int, data: memoryview) -> float:
    """Bytes per second; every batch is durable on three replicas when it returns."""
    started = time.monotonic()
    for start in range(0, size, BATCH_BYTES):
        client.batch_write([(PATH, start, data[: min(BATCH_BYTES, size - start)])])
    return size / (time.monotonic() - started)


def batch_read(client: threefs.Client, size: int, into: memoryview) -> float:
    """Bytes per second, into one buffer that is used again."""
    started = time.monotonic()
    for start in range(0, size, BATCH_BYTES):
        client.batch_read_into([(PATH, start, into[: min(BATCH_BYTES, size - start)])])
    return size / (time.monotonic() - started)


def forget_cache() -> bool:
    """Drop caches, so that the next read is from disk; needs root."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def measure(folder: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Rates of every measurement, one list entry a round."""
    rates: dict[str, list[float]] = {}
    data = memoryview(os.urandom(BATCH_BYTES))
    into = memoryview(bytearray(BATCH_BYTES))
    raw = folder / "raw"
    raw.mkdir()
    with (
        serving(folder) as cluster,
        threefs.connect(cluster.file, timeout_seconds=TIMEOUT_SECONDS) as client,
        _mounts(folder, client) as places,
    ):
        steps: dict[str, Callable[[], float]] = {
            "fio write, 1 writer": lambda: fio(raw, size, rw="write"),
            "fio write, 3 writers": lambda: fio(raw, size, rw="write", jobs=3),
            "3FS write, 3 replicas": lambda: batch_write(client, size, data),
            "3FS read, cached": lambda: batch_read(client, size, into),
        }
        if forget_cache():
            steps["3FS read, cold"] = lambda: (forget_cache(), batch_read(client, size, into))[1]
        steps["fio read, 1 reader"] = lambda: fio(raw, size, rw="read")
        steps |= storage_mount.steps(places, size // 4)
        if "mount" in places:
            steps |= storage_random.steps(places)
        for number in range(rounds):
            for name, step in steps.items():
                rates.setdefault(name, []).append(step())
                say(f"round {number + 1}: {name}: {shown(name, rates[name][-1])}")
    return rates


@contextmanager
def _mounts(folder: Path, client: threefs.Client) -> Iterator[dict[str, Path]]:
    """The measured directories; only a local one where this user may not mount."""
    local = folder / "local"
    local.mkdir()
    if not storage_mount.can_mount():
        yield {}
        return
    with ExitStack() as stack:
        cluster = folder / "cluster" / "cluster.json"
        places = stack.enter_context(storage_mount.mounted(cluster, folder, client))
        if storage_gluster.is_installed():
            places[PEER] = stack.enter_context(storage_gluster.volume(folder / "gluster"))
        else:
            say(f"{PEER} is not installed (`make bench-storage` installs it)")
        yield {"local": local, **places}


def shown(name: str, rate: float) -> str:
    """With its unit."""
    if "/s" in name:
        return f"{rate:,.0f}/s"
    return f"{describe_bytes(rate)}/s"


def summary(rates: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Medians and ratios: to a limit of the disk, and to the peer."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    write, read_rate = median["3FS write, 3 replicas"], median["3FS read, cached"]
    ratios = {
        "write / (fio 3 writers / 3)": write / (median["fio write, 3 writers"] / 3),
        "write / fio 1 writer": write / median["fio write, 1 writer"],
        "cached read / fio read": read_rate / median["fio read, 1 reader"],
    }
    if "3FS read, cold" in median:
        ratios["cold read / fio read"] = median["3FS read, cold"] / median["fio read, 1 reader"]
    if "mount: write" in median:
        for name in ("mount", "mount, write-back"):
            limit = median["fio write, 3 writers"] / 3
            ratios[f"{name}: write / (fio 3 writers / 3)"] = median[f"{name}: write"] / limit
            ratios[f"{name}: read / fio read"] = (
                median[f"{name}: read"] / median["fio read, 1 reader"]
            )
    for name in [name for name in median if name.startswith(f"{PEER}: ")]:
        work = name.removeprefix(f"{PEER}: ")
        for place in ("mount", "mount, write-back"):
            ratios[f"{place} / {PEER}: {work}"] = median[f"{place}: {work}"] / median[name]
    return {
        "config": {
            "bytes": size,
            "batch_bytes": BATCH_BYTES,
            "replicas": 3,
            "storage_processes": 3,
        },
        "machine": machine(),
        "per_second": median,
        "rounds": rates,
        "ratios": ratios,
    }


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="1G", help="bytes to write and read")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=OUTPUT / "storage-data")
    parser.add_argument("--output", type=Path, default=OUTPUT / "storage.json")
    arguments = parser.parse_args()
    size = bytes_of(arguments.size)
    if shutil.which("fio") is None:
        raise SystemExit(
            "fio is missing; install it (`apt install fio`) or use `make bench-storage`"
        )
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    try:
        result = summary(measure(arguments.folder, size, arguments.rounds), size)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    write_json(arguments.output, result)
    print(f"# {describe_bytes(size)}, batches of {describe_bytes(BATCH_BYTES)}, median of rounds")
    print(f"{'measurement':<64} {'rate':>14} {'spread':>8}")
    for name, rate in result["per_second"].items():
        values = result["rounds"][name]
        spread = (max(values) - min(values)) / rate
        print(f"{name:<64} {shown(name, rate):>14} {spread:>8.0%}")
    for name, ratio in result["ratios"].items():
        print(f"{name:<64} {ratio:>14.2f}")


if __name__ == "__main__":
    main()

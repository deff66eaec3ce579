"""Benchmark of 3FS and its peers on one machine: durable writes, reads, small files, idle services.

A round runs every measurement once, so that a slow minute of the machine hits all of them; a figure
is the median over the rounds. Three replicas on one disk write every byte three times: the bound
of a three-replica write is a third of what three writers reach together (`fio --numjobs=3`).
Files of a mount are compared with those of a local directory and of the volumes of GlusterFS and
MooseFS with three replicas, reads with iperf3 over loopback. A peer that is not installed is named
with the reason. As root, everything runs in namespaces for mounts and processes: nothing is left
mounted or running, also after SIGKILL.

    python -m bench.storage [--size 1G] [--rounds 3] [--output build/bench/storage.json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import threefs
from threefs.cli.output import bytes_of, describe_bytes

from bench.report import OUTPUT, machine, say, write_json
from bench.storage import gluster, moosefs, mounts, network, random_io, rows, small_files
from bench.storage.idle import idle
from bench.storage.namespaces import isolate
from bench.storage_load import TIMEOUT_SECONDS, serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.storage_load import Cluster

BATCH_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
PATH = "/bench"
PEERS: Final = {"GlusterFS": gluster, "MooseFS": moosefs}


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


class Bench:
    """The systems that are measured, all of them running until it is closed."""

    def __init__(self, folder: Path, size: int, stack: ExitStack) -> None:
        self.folder, self.size, self.stack = folder, size, stack
        self.missing: dict[str, str] = {}
        self.data = memoryview(os.urandom(BATCH_BYTES))
        self.into = memoryview(bytearray(BATCH_BYTES))
        self.cluster = stack.enter_context(serving(folder))
        self.client = self._connect(self.cluster)
        self.systems = {"3FS": (self.cluster.pid, "")}
        self.places = self._places()

    def _connect(self, cluster: Cluster) -> threefs.Client:
        client = threefs.connect(cluster.file, timeout_seconds=TIMEOUT_SECONDS)
        return self.stack.enter_context(client)

    def _places(self) -> dict[str, Path]:
        """The measured directories; none where this user may not mount."""
        if not mounts.can_mount():
            self.missing["files of a mount"] = "mounts need root and /dev/fuse"
            return {}
        local = self.folder / "local"
        local.mkdir()
        places = {"local": local}
        places |= self.stack.enter_context(
            mounts.mounted(self.cluster.file, self.folder, self.client)
        )
        for name, peer in PEERS.items():
            if not peer.is_installed():
                self.missing[name] = f"not installed (apt install {peer.PACKAGES})"
                continue
            try:
                volume = self.stack.enter_context(peer.volume(self.folder / name.lower()))
            except RuntimeError as error:
                self.missing[name] = str(error)
                continue
            places[name] = volume.path
            self.systems[name] = (volume.pid, volume.mount)
        return places

    def steps(self) -> dict[str, Callable[[], float]]:
        """The measurements of a round, in their order."""
        raw = self.folder / "raw"
        raw.mkdir()
        size, client, into = self.size, self.client, self.into
        steps: dict[str, Callable[[], float]] = {
            rows.FIO_1: partial(fio, raw, size, rw="write"),
            rows.FIO_3: partial(fio, raw, size, rw="write", jobs=3),
            rows.WRITE: partial(batch_write, client, size, self.data),
            rows.CACHED: partial(batch_read, client, size, into),
        }
        steps |= self._network()
        if forget_cache():
            steps[rows.COLD] = lambda: (forget_cache(), batch_read(client, size, into))[1]
        else:
            self.missing[rows.COLD] = "dropping the page cache needs root"
        steps[rows.FIO_READ] = partial(fio, raw, size, rw="read")
        steps["client: stats/s, 16 threads"] = partial(small_files.client_stats, client, PATH)
        if self.places:
            steps |= mounts.steps(self.places, size // 4)
            steps |= small_files.steps(self.places)
            steps |= random_io.steps(self.places)
        return steps

    def _network(self) -> dict[str, Callable[[], float]]:
        """Reads over TCP, of a second cluster, and the rate of a TCP stream."""
        if shutil.which("iperf3") is None:
            self.missing[rows.IPERF3] = "not installed (apt install iperf3)"
            return {}
        folder = self.folder / "tcp"
        folder.mkdir()
        client = self._connect(self.stack.enter_context(network.serving_tcp(folder)))
        batch_write(client, self.size, self.data)
        return {
            rows.IPERF3: network.iperf3,
            rows.TCP: partial(batch_read, client, self.size, self.into),
        }


def measure(folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """The summary of all rounds."""
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        bench = Bench(folder, size, stack)
        without_work = _idle(bench, "before the first round")
        steps = bench.steps()
        for number in range(rounds):
            for name, step in steps.items():
                rates.setdefault(name, []).append(step())
                say(f"round {number + 1}: {name}: {rows.shown(name, rates[name][-1])}")
        without_work |= _idle(bench, "after the last round")
    config = {"bytes": size, "batch_bytes": BATCH_BYTES, "replicas": 3, "storage_processes": 3}
    result = rows.summary(rates, without_work, bench.missing)
    return {"config": config, "machine": machine(), **result}


def _idle(bench: Bench, moment: str) -> dict[str, float]:
    figures = {f"idle, {moment}: {name}": value for name, value in idle(bench.systems).items()}
    for name, value in figures.items():
        say(f"{name}: {rows.shown(name, value)}")
    return figures


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
    if mounts.can_mount():
        isolate()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    try:
        result = measure(arguments.folder, size, arguments.rounds)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    write_json(arguments.output, result)
    print(f"# {describe_bytes(size)}, batches of {describe_bytes(BATCH_BYTES)}, median of rounds")
    print("\n".join(rows.table(result)))


if __name__ == "__main__":
    main()

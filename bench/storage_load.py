"""3FS under load: many writers, a stopped replica, mgmtd and meta; many readers of which half stop.

Every process of a phase starts before the phase does. Rates are compared within one run only. All
phases overwrite the same files, which are written once before: few writers that overwrite few files
would measure the page cache. Each writer checks that its files hold exactly its last acknowledged
batches; any error counts.

    python -m bench.storage_load [--writers 4,24,96] [--seconds 12] [--readers 120] [--full 95]
        [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import threefs

from bench.report import OUTPUT, ROOT, peak_bytes, say, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH_BYTES = 16 << 20
READ_BYTES = 64 << 20
THREADS = 2
SERVICES = ["storage-1", "storage-2", "storage-3"]
STOPPED_SECONDS = {"storage-2": 12.0, "mgmtd": 60.0, "meta": 60.0}
READ_PATH = "/load-read"
TIMEOUT_SECONDS = 120.0


@dataclass
class Cluster:
    """A `threefs serve` process of three storage services."""

    folder: Path
    file: Path
    pid: int
    """The process that started the services."""
    pids: dict[str, int]

    def resident_bytes(self) -> dict[str, int]:
        """Peak usage of each storage service."""
        return {service: peak_bytes(self.pids[service]) for service in SERVICES}


@contextmanager
def serving(folder: Path, capacity_bytes: int = 0) -> Iterator[Cluster]:
    """A cluster in `folder`, removed afterwards. Node capacity: 0 is that of its disk."""
    command = [sys.executable, "-m", "threefs", "serve", "--data", str(folder / "cluster")]
    command += ["--capacity", str(capacity_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            raise SystemExit("the cluster did not start; its message is above")
        file = folder / "cluster" / "cluster.json"
        pids = json.loads(file.read_text())["pids"]
        yield Cluster(folder, file, process.pid, pids)
    finally:
        process.terminate()
        process.wait(timeout=60)


class Workers:
    """Processes of one phase, all ready before the first of them starts."""

    def __init__(
        self, cluster: Cluster, kind: str, count: int, shared: Path, files: int = 0
    ) -> None:
        command = [sys.executable, "-m", "bench.storage_load", "--worker"]
        command += [kind, str(cluster.file), str(shared)]
        self.processes = [
            subprocess.Popen(
                [*command, str(number), str(count), str(files)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for number in range(count)
        ]
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"a {kind} did not start; its message is above")

    def start(self, end: float, processes: list[subprocess.Popen[str]] | None = None) -> None:
        """Let them work until `end` of the monotonic clock."""
        for process in self.processes if processes is None else processes:
            assert process.stdin is not None
            process.stdin.write(f"{end}\n")
            process.stdin.flush()

    def results(self) -> list[dict[str, Any]]:
        """The final report of each process."""
        reports = []
        for process in self.processes:
            assert process.stdout is not None
            reports.append(json.loads(process.stdout.readline()))
            process.wait(timeout=60)
        return reports


@dataclass
class Phase:
    """Figures of one phase."""

    name: str
    bytes_per_second: float
    errors: int
    wrong: int
    resident_bytes_max: int
    seconds: dict[str, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


def rate(reports: list[dict[str, Any]], start: float, end: float) -> float:
    """Bytes per second of all batches, each spread evenly over its own time."""
    total = 0.0
    for report in reports:
        for started, ended, size in report["batches"]:
            overlap = min(ended, end) - max(started, start)
            if overlap > 0:
                total += size * overlap / (ended - started)
    return total / (end - start)


def phase_of(name: str, reports: list[dict[str, Any]], bps: float, cluster: Cluster) -> Phase:
    """The figures of a phase from its workers' reports."""
    messages = [message for report in reports for message in report["errors"]]
    return Phase(
        name=name,
        bytes_per_second=bps,
        errors=len(messages),
        wrong=sum(report["wrong"] for report in reports),
        resident_bytes_max=max(cluster.resident_bytes().values()),
        messages=messages[:3],
    )


def write_phase(cluster: Cluster, writers: int, seconds: float, shared: Path, files: int) -> Phase:
    """All writers for `seconds`; the first fifth, in which they start, does not count."""
    workers = Workers(cluster, "writer", writers, shared, files)
    start = time.monotonic()
    workers.start(start + seconds)
    reports = workers.results()
    bps = rate(reports, start + seconds / 5, start + seconds)
    return phase_of(f"{writers} writers", reports, bps, cluster)


def longest_pause(reports: list[dict[str, Any]], start: float, end: float) -> float:
    """Seconds in which no writer completed a batch."""
    ends: list[float] = sorted(ended for report in reports for _, ended, _ in report["batches"])
    moments = [start, *(moment for moment in ends if start < moment < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


def stopped_phase(
    cluster: Cluster, service: str, writers: int, seconds: float, shared: Path, files: int
) -> Phase:
    """A service is stopped for a while in the middle of the writing."""
    stopped_seconds = STOPPED_SECONDS[service]
    workers = Workers(cluster, "writer", writers, shared, files)
    start = time.monotonic()
    stop_at, end = start + seconds, start + 2 * seconds + stopped_seconds + 8
    workers.start(end)
    time.sleep(max(0.0, stop_at - time.monotonic()))
    pid = cluster.pids[service]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped_seconds)
    os.kill(pid, signal.SIGCONT)
    back = time.monotonic()
    reports = workers.results()
    before = rate(reports, start + seconds / 5, stop_at)
    phase = phase_of(
        f"{writers} writers, {service} stopped for {stopped_seconds:.0f} s",
        reports,
        before,
        cluster,
    )
    after = [
        rate(reports, back + second, back + second + 2) for second in range(int(end - back) - 2)
    ]
    full = [second for second, bps in enumerate(after) if bps >= 0.8 * before]
    phase.seconds = {
        "rate while stopped / before": rate(reports, stop_at, back) / before,
        "longest pause in seconds": longest_pause(reports, stop_at, end),
        "rate in seconds 5 to 15 after / before": rate(reports, back + 5, end) / before,
        "seconds to 0.8 of the rate before": float(full[0]) if full else float("inf"),
    }
    return phase


def read_phase(cluster: Cluster, readers: int, seconds: float, shared: Path) -> Phase:
    """Half of the readers, then all of them of which the other half is stopped in the middle."""
    workers = Workers(cluster, "reader", readers, shared)
    half = workers.processes[: readers // 2]
    other = workers.processes[readers // 2 :]
    start = time.monotonic()
    end = start + 2 * seconds + 6
    workers.start(end, half)
    time.sleep(seconds)
    alone_end = time.monotonic()
    workers.start(end, other)
    time.sleep(3)
    for process in other:
        process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    time.sleep(max(0.0, end - time.monotonic()))
    for process in other:
        process.send_signal(signal.SIGCONT)
    reports = workers.results()
    running = reports[: len(half)]
    alone = rate(running, start + seconds / 5, alone_end)
    phase = phase_of(f"{readers} readers, half stopped", reports, alone, cluster)
    phase.seconds = {"rate of the others / alone": rate(running, stopped, end - 0.5) / alone}
    return phase


def worker(kind: str, file: str, shared: str, number: int, count: int, files: int) -> None:
    """One process: ready, waits for its end time, works, reports one line of JSON."""
    with threefs.connect(file, timeout_seconds=TIMEOUT_SECONDS) as client:
        descriptor = os.open(shared, os.O_RDWR)
        memory = memoryview(mmap.mmap(descriptor, 0))
        report: dict[str, Any] = {"batches": [], "errors": [], "wrong": 0}
        print("ready", flush=True)
        end = float(sys.stdin.readline())
        if kind == "reader":
            read(client, memory, end, number, report)
        else:
            threads = [
                threading.Thread(target=write, args=(client, memory, end, own, report))
                for own in (
                    range(number * THREADS + thread, files, count * THREADS)
                    for thread in range(THREADS)
                )
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        print(json.dumps(report), flush=True)


def write(
    client: threefs.Client, memory: memoryview, end: float, own: range, report: dict[str, Any]
) -> None:
    """Overwrite own files in turn with parts of the shared random bytes, then check them."""
    room = len(memory) - BATCH_BYTES
    last: dict[str, int | None] = {}
    for turn, index in enumerate(itertools.cycle(own)):
        if time.monotonic() >= end:
            break
        path = path_of(index)
        at = (index * 104_729 + turn * 1_299_709) % room
        started = time.monotonic()
        try:
            client.batch_write([(path, 0, memory[at : at + BATCH_BYTES])])
        except threefs.ThreeFSError as error:
            report["errors"].append(f"{path}: {error}")
            last[path] = None
            continue
        last[path] = at
        report["batches"].append((started, time.monotonic(), BATCH_BYTES))
    for path, at in ((path, at) for path, at in last.items() if at is not None):
        if client.read_file(path) != memory[at : at + BATCH_BYTES]:
            report["wrong"] += 1


def path_of(index: int) -> str:
    """The file of this number."""
    return f"/load-{index}"


def read(
    client: threefs.Client,
    memory: memoryview,
    end: float,
    number: int,
    report: dict[str, Any],
) -> None:
    """Read one file into memory that all readers share: all read the same bytes."""
    while time.monotonic() < end:
        started = time.monotonic()
        try:
            client.batch_read_into([(READ_PATH, 0, memory[:READ_BYTES])])
        except threefs.ThreeFSError as error:
            report["errors"].append(f"reader {number}: {error}")
            continue
        report["batches"].append((started, time.monotonic(), READ_BYTES))


def shared_bytes(folder: Path, name: str, size: int) -> Path:
    """Random bytes in memory that all workers map."""
    path = folder / name
    path.write_bytes(os.urandom(size))
    return path


def fill(cluster: Cluster, files: int, shared: Path) -> None:
    """Write each file once."""
    memory = memoryview(shared.read_bytes())[:BATCH_BYTES]
    with threefs.connect(cluster.file, timeout_seconds=TIMEOUT_SECONDS) as client:
        for index in range(files):
            client.write_file(path_of(index), memory)


def remove(cluster: Cluster, files: int) -> None:
    """Remove them all."""
    with threefs.connect(cluster.file, timeout_seconds=TIMEOUT_SECONDS) as client:
        for index in range(files):
            client.remove(path_of(index))


def check_room(folder: Path, writers: list[int], full_percent: int) -> None:
    """Refuse to start where the files of the largest phase do not fit."""
    # Three replicas of each file, and as much again while one is overwritten and another synced.
    percent = 100 * 100 // full_percent if full_percent else 200
    required = len(SERVICES) * max(writers, default=0) * THREADS * BATCH_BYTES * percent // 100
    free = shutil.disk_usage(folder).free
    if free < required:
        raise SystemExit(
            f"{folder} has {free >> 30} GiB free, {max(writers)} writers need {required >> 30}: "
            "give another --folder or fewer --writers"
        )


def run(
    writers: list[int], seconds: float, readers: int, folder: Path, full_percent: int
) -> list[Phase]:
    """All phases on one cluster; the smallest number of writers once more at the end."""
    phases = []
    files = max(writers, default=0) * THREADS
    capacity_bytes = files * BATCH_BYTES * 100 // full_percent if full_percent else 0

    def record(phase: Phase) -> None:
        phases.append(phase)
        say(described(phase))

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="storage-load-") as memory,
        serving(folder, capacity_bytes) as cluster,
    ):
        shared = shared_bytes(Path(memory), "write", BATCH_BYTES + (8 << 20))
        if writers:
            fill(cluster, files, shared)
            for count in [*writers, writers[0]] if len(writers) > 1 else writers:
                record(write_phase(cluster, count, seconds, shared, files))
            stopped = writers[min(1, len(writers) - 1)]
            for service in [] if full_percent else STOPPED_SECONDS:
                record(stopped_phase(cluster, service, stopped, seconds, shared, files))
            remove(cluster, files)
        if readers:
            shared = shared_bytes(Path(memory), "read", READ_BYTES)
            with threefs.connect(cluster.file, timeout_seconds=TIMEOUT_SECONDS) as client:
                expected = shared.read_bytes()
                client.write_file(READ_PATH, expected)
            reads = read_phase(cluster, readers, seconds, shared)
            reads.wrong += int(shared.read_bytes() != expected)
            record(reads)
    return phases


def described(phase: Phase) -> str:
    """One line, and the first errors."""
    figures = ", ".join(f"{name} {value:.2f}" for name, value in phase.seconds.items())
    return (
        f"{phase.name}: {phase.bytes_per_second / 1e6:,.0f} MB/s, {phase.errors} errors, "
        f"{phase.wrong} wrong, at most {phase.resident_bytes_max / 1e6:,.0f} MB resident"
        + (f"; {figures}" if figures else "")
        + "".join(f"\n    {message}" for message in phase.messages)
    )


def ratios_of(phases: list[Phase], writers: list[int]) -> dict[str, float]:
    """Rate with the most writers divided by the rate with the fewest, each a mean of two phases."""
    of = {
        count: [it.bytes_per_second for it in phases if it.name == f"{count} writers"]
        for count in writers
    }
    if len(writers) < 2:
        return {}
    few, many = statistics.mean(of[writers[0]]), statistics.mean(of[writers[-1]])
    return {f"{writers[-1]} writers / {writers[0]}": many / few}


def main() -> None:
    """Run the phases, or be a worker of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--writers", default="4,24,96", help="numbers of writing processes")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a phase")
    parser.add_argument("--readers", type=int, default=120, help="reading processes; 0: none")
    parser.add_argument(
        "--full",
        type=int,
        default=0,
        metavar="PERCENT",
        help="bound each node's capacity so that the files take this part of it; writers only",
    )
    parser.add_argument("--folder", type=Path, help="where the cluster's data goes")
    parser.add_argument("--output", type=Path, default=OUTPUT / "storage_load.json")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        kind, file, shared, *numbers = args.worker
        worker(kind, file, shared, *map(int, numbers))
        return
    writers = [int(count) for count in args.writers.split(",") if count]
    with tempfile.TemporaryDirectory(prefix="storage-load-", dir=args.folder) as folder:
        check_room(Path(folder), writers, args.full)
        readers = 0 if args.full else args.readers
        phases = run(writers, args.seconds, readers, Path(folder), args.full)
    ratios = ratios_of(phases, writers)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    report = {"phases": [asdict(phase) for phase in phases], "ratios": ratios}
    write_json(args.output, report)
    if any(phase.errors or phase.wrong for phase in phases):
        raise SystemExit("errors or wrong bytes: see above")


if __name__ == "__main__":
    main()

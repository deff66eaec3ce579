"""One run: load and faults, recovery, and the checks of what was recorded."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import threefs

from bench.chaos.client import NameCalls, open_blocks
from bench.chaos.cluster import ChaosCluster, ChaosError, wait_for
from bench.chaos.faults import draw
from bench.chaos.history import Recorder, read_records
from bench.chaos.load import disturb
from bench.chaos.verdict import Result, judge, measure
from bench.chaos.workload import (
    BLOCK_BYTES,
    DIRECTORIES_PER_CELL,
    FINAL_WORKER,
    ClientPlan,
    cells,
    shared_files,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.chaos.workload import Cell, SharedFile

__all__ = ["Load", "run"]

OPERATION_SECONDS = 60.0
"""Deadline of an operation."""
RECOVERY_SECONDS = 120.0
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """How much a run does at once."""

    clients: int = 4
    name_workers: int = 5
    data_workers: int = 2
    private_workers: int = 1
    cells: int = 12
    files: int = 3
    blocks: int = 8
    seconds: float = 8.0
    faults: int = 1


class _Tree:
    """The directories and files of a run."""

    def __init__(self, seed: int, load: Load) -> None:
        # A cluster may see a seed twice.
        self.root = f"/run-{seed}-{time.monotonic_ns():x}"
        self.cells = cells(f"{self.root}/names", load.cells)
        self.files = shared_files(f"{self.root}/files", load.files, load.blocks, CHUNK_BYTES)
        self.private = [f"{self.root}/private/{number}" for number in range(load.clients)]

    def make(self, client: threefs.Client) -> None:
        for name in ("", "/names", "/files", "/private"):
            client.make_directory(self.root + name)
        for folder in (*(each for cell in self.cells for each in cell.folders), *self.private):
            client.make_directory(folder)
        for file in self.files:
            with client.open_raw(file.name, "w+") as created:
                created.truncate(file.offsets[-1] + BLOCK_BYTES)

    def read_private(self, client: threefs.Client) -> dict[str, dict[str, int]]:
        """Value of each file in each private directory."""
        found = {}
        for private in self.private:
            for folder in (f"{private}/{worker}" for worker in client.listdir(private)):
                paths = [f"{folder}/{name}" for name in client.listdir(folder)]
                contents = client.batch_read([(path, 0, None) for path in paths])
                values = [int.from_bytes(data[:8], "big") for data in contents]
                found[folder] = dict(zip(paths, values, strict=True))
        return found


class _FinalReader:
    """Reads all shared objects through one metadata service, as part of the history."""

    def __init__(self, client: threefs.Client, history: Path, meta: int) -> None:
        worker = FINAL_WORKER + meta
        self._client = client
        self._recorder = Recorder(history / f"{worker}.history", worker)

    def read_names(self, cell: Cell) -> None:
        calls = NameCalls(self._client)
        lists = [("list", place) for place in range(DIRECTORIES_PER_CELL)]
        for call in [*lists, *(("stat", slot) for slot in range(len(cell.slots)))]:

            def execute(call: tuple[str, int] = call) -> str | int:
                return calls(cell, call)

            self._recorder.execute("lookup", cell.name, call, execute, threefs.Unavailable)

    def read_blocks(self, file: SharedFile) -> None:
        access = open_blocks([file], "", self._client)
        for offset in file.offsets:

            def execute(offset: int = offset) -> int:
                value = access(file.name, offset)
                assert value is not None
                return value

            name = f"{file.name}@{offset}"
            self._recorder.execute("read", name, ("read",), execute, threefs.Unavailable)


def run(
    cluster: ChaosCluster, mounts: Sequence[Path], seed: int, load: Load, faults: Sequence[str],
    folder: Path,
) -> Result:  # fmt: skip
    """Carries out one run; its folder is removed unless something failed."""
    result = Result(seed)
    try:
        _carry_out(cluster, mounts, load, faults, folder, result)
    except (ChaosError, threefs.ThreeFSError, OSError, subprocess.TimeoutExpired) as error:
        result.failures.append(f"{type(error).__name__}: {error}")
    result.load_average = os.getloadavg()[0]
    if result.failures:
        cluster.keep_logs(folder)
    else:
        shutil.rmtree(folder)
    return result


def _carry_out(
    cluster: ChaosCluster, mounts: Sequence[Path], load: Load, faults: Sequence[str], folder: Path,
    result: Result,
) -> None:  # fmt: skip
    history = folder / "history"
    history.mkdir(parents=True)
    tree = _Tree(result.seed, load)
    with cluster.client(OPERATION_SECONDS) as client:
        tree.make(client)
        plans = [
            ClientPlan(
                number=number,
                seed=result.seed,
                cluster=str(cluster.file),
                timeout_seconds=OPERATION_SECONDS,
                history=str(history),
                private=tree.private[number],
                mount=str(mounts[number % len(mounts)]) if mounts else "",
                cells=tree.cells,
                files=tree.files,
                name_workers=load.name_workers,
                data_workers=load.data_workers,
                private_workers=load.private_workers,
            )
            for number in range(load.clients)
        ]
        drawn = draw(result.seed, faults, load.faults)
        happened = disturb(cluster, plans, drawn, load.seconds, folder)
        result.failures += happened.errors
        wait_for(cluster.is_whole, RECOVERY_SECONDS, "recovery of every service")
        result.recovery_seconds = (time.monotonic_ns() - happened.ended_ns) / 1e9
        for number, reading in enumerate(cluster.clients_of_each_meta(OPERATION_SECONDS)):
            with reading:
                final = _FinalReader(reading, history, number)
                for cell in tree.cells:
                    final.read_names(cell)
                for file in tree.files:
                    final.read_blocks(file)
        records = [each for path in sorted(history.iterdir()) for each in read_records(path)]
        judge(result, records, tree.read_private(client), happened.killed_clients)
        measure(result, records, happened, cluster.lease_seconds)
        result.failures += cluster.check()
        client.rmtree(tree.root)

"""Benchmark of HFReduce and Gloo over a slow network of namespaces (`bench.netns`).

The rows report how close an allreduce comes to 2S/B (each card sends and receives every byte twice)
and the bytes that cross between the zones: S each way is the minimum.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.netns import Network
from bench.report import ROOT

MIB = 1 << 20
BACKENDS = ("hfreduce", "gloo")
PORT = 29_400
WORKER_SECONDS = 200
TUNED_CHUNK_BYTES = 32 << 10
"""Set by hand (HFREDUCE_CHUNK_BYTES), next to the engine's default: on a slow wire a chunk takes
long to pass: 256 KiB at 1 Gb/s take 2 ms, and each hop of a tree waits for a whole one."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement."""

    rounds: int
    chunk_bytes: int = 0
    """0: the engine's default."""
    size_bytes: int = 16 * MIB
    zones: tuple[int, int] = (4, 4)
    megabits: int = 1000

    @property
    def limit_seconds(self) -> float:
        """2S/B."""
        return 2 * self.size_bytes / (self.megabits * 1e6 / 8)


def measure(rank: int, size: int, size_bytes: int, rounds: int, folder: Path) -> None:
    """One machine: rounds of one allreduce with each backend, in step with the coordinator."""
    import hfreduce.torch  # noqa: F401
    import torch
    import torch.distributed as dist

    # Exit with the coordinator even if it is killed.
    until = time.monotonic() + WORKER_SECONDS
    dist.init_process_group("hfreduce", rank=rank, world_size=size)
    groups: dict[str, Any] = {"hfreduce": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    tensor = torch.ones(size_bytes // 4)
    for group in groups.values():
        dist.all_reduce(torch.ones(1024), group=group)
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for number in range(rounds + 1):
        for name, group in groups.items():
            tensor.fill_(1.0)
            (folder / f"ready-{number}-{name}-{rank}").touch()
            go = folder / f"go-{number}-{name}"
            while not go.exists():
                if time.monotonic() > until:
                    raise SystemExit(f"rank {rank}: no {go.name} in {WORKER_SECONDS} s")
                time.sleep(0.005)
            started = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            seconds[name].append(time.perf_counter() - started)
            if tensor[0] != size or tensor[-1] != size:
                raise SystemExit(f"{name}: rank {rank} has {tensor[0]} and {tensor[-1]}")
            (folder / f"done-{number}-{name}-{rank}").touch()
    (folder / f"result-{rank}").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def start(network: Network, rank: int, trial: Trial, folder: Path) -> Any:
    """Starts a machine's worker in its namespace."""
    size = sum(network.zones)
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "FLYER_TOPOLOGY": str(folder / "topology.json"),
        "OMP_NUM_THREADS": "1",
    }
    if trial.chunk_bytes:
        environment["HFREDUCE_CHUNK_BYTES"] = str(trial.chunk_bytes)
    numbers = (rank, size, trial.size_bytes, trial.rounds)
    command = [sys.executable, "-m", "bench.collectives.netns", *map(str, numbers), str(folder)]
    command = ["ip", "netns", "exec", network.host(rank), *command]
    return subprocess.Popen(command, env=environment, cwd=ROOT)


def wait_for(folder: Path, pattern: str, count: int, workers: list[Any], until: float) -> None:
    """Waits for this number of files; fails as soon as a worker fails."""
    while len(list(folder.glob(pattern))) < count:
        failed = [rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)]
        if failed:
            raise SystemExit(f"rank {failed[0]} failed with status {workers[failed[0]].poll()}")
        if time.monotonic() > until:
            raise SystemExit(f"no {pattern} from all {count} ranks in {WORKER_SECONDS} s")
        time.sleep(0.005)


def run_rounds(network: Network, trial: Trial, folder: Path) -> dict[str, Any]:
    """Runs all rounds; by backend the slowest rank's seconds and the bytes that crossed."""
    size = sum(network.zones)
    places = [
        {
            "name": f"n{rank}",
            "zone": f"zone-{network.zone_of(rank)}",
            "address": network.address(rank),
        }
        for rank in range(size)
    ]
    topology = {"version": 1, "ranks_per_node": 1, "nodes": places}
    (folder / "topology.json").write_text(json.dumps(topology))
    workers = [start(network, rank, trial, folder) for rank in range(size)]
    until = time.monotonic() + WORKER_SECONDS
    crossed: dict[str, list[list[int]]] = {name: [] for name in BACKENDS}
    try:
        for number in range(trial.rounds + 1):
            for name in BACKENDS:
                wait_for(folder, f"ready-{number}-{name}-*", size, workers, until)
                before = network.crossed()
                (folder / f"go-{number}-{name}").touch()
                wait_for(folder, f"done-{number}-{name}-*", size, workers, until)
                after = network.crossed()
                crossed[name].append([b - a for a, b in zip(before, after, strict=True)])
        wait_for(folder, "result-*", size, workers, until)
        for worker in workers:
            worker.wait(timeout=30)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    results = [json.loads((folder / f"result-{rank}").read_text()) for rank in range(size)]
    # The first round warms up connections and memory.
    return {
        name: {
            "seconds": [max(times) for times in zip(*(r[name] for r in results), strict=True)][1:],
            "crossed_bytes": crossed[name][1:],
        }
        for name in BACKENDS
    }


def measured(trial: Trial) -> dict[str, Any]:
    """Builds the network, runs all rounds and removes the network."""
    with tempfile.TemporaryDirectory() as name, Network(trial.zones, trial.megabits) as network:
        return run_rounds(network, trial, Path(name))


if __name__ == "__main__":
    rank, size, size_bytes, rounds = map(int, sys.argv[1:5])
    measure(rank, size, size_bytes, rounds, Path(sys.argv[5]))

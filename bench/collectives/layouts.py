"""Benchmark of HFReduce and torch's Gloo: same ranks, same tensors, alternating rounds.

Both backends live in the same eight processes. A round runs every case once with each of them, so
that a slow minute of the machine hits both; a figure is the median over the rounds of the slowest
rank's time. The demo's gradient buckets are those of `examples/gpt` under DDP's defaults.

    python -m bench.collectives.layouts [--rounds 7] [--output build/bench/collectives-layouts.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from bench.collectives.torch_rank import example_model

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""DDP's defaults: a small first bucket, so that communication starts early."""

LAYOUTS = {
    "4 nodes x 2 ranks, two zones, TCP": (Layout.two_zones(2, 2), "tcp"),
    "the same through shared memory": (Layout.two_zones(2, 2), "auto"),
    "1 node x 8 ranks": (Layout.one_node(8), "auto"),
}
"""Ranks, and HFREDUCE_TRANSPORT. Four real nodes use TCP; shared memory between nodes exists only
where one machine simulates them, and Gloo uses TCP in all three."""

GOAL = ("4 nodes x 2 ranks, two zones, TCP", "gradient buckets", "float32", 3.0)

ROUND_SECONDS = 0.25
"""Approximate time of one backend for one case in one round."""


def gradient_buckets() -> list[int]:
    """Elements of each gradient bucket of the demo's GPT, in the order in which DDP sends them."""
    # After the first step DDP groups gradients in the order in which they became ready.
    parameters: list[torch.Tensor] = [*reversed([*example_model().parameters()])]
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    buckets, _ = _compute_bucket_assignment_by_size(parameters, limits)
    return [sum(parameters[index].numel() for index in bucket) for bucket in buckets]


def cases() -> list[tuple[str, str, list[int]]]:
    """(name, type, elements of each tensor of one call)."""
    listed = [("gradient buckets", "float32", gradient_buckets())]
    for name, count in (
        ("4 KiB", 4096),
        ("1 MiB", MIB),
        ("16 MiB", 16 * MIB),
        ("64 MiB", 64 * MIB),
    ):
        listed.append((name, "float32", [count // 4]))
        listed.append((name, "bfloat16", [count // 2]))
    return listed


def measure(rank: int, size: int, rounds: int, quick: bool) -> dict[str, Any]:  # noqa: FBT001
    """Runs one rank: every case with both backends, and the memory bandwidth, in each round."""
    import hfreduce.torch

    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    groups = {"hfreduce": dist.group.WORLD, "gloo": gloo}
    listed = [case for case in cases() if not quick or "MiB" not in case[0]]
    buffers = [
        [torch.ones(n, dtype=getattr(torch, kind)) for n in sizes] for _, kind, sizes in listed
    ]
    repeats: dict[tuple[int, str], int] = {}
    seconds: dict[tuple[int, str], list[float]] = {}
    triads: list[float] = []
    arrays = [torch.ones(16 * MIB) for _ in range(3)] if rank < 2 else []
    for number in range(rounds + 1):
        for index, tensors in enumerate(buffers):
            for backend, group in groups.items():
                key = (index, backend)
                count = repeats.get(key, 1)
                for tensor in tensors:
                    tensor.fill_(number == 0)
                dist.barrier(group=gloo)
                seconds_taken = slowest(timed(tensors, group, count), gloo)
                if number == 0:  # warms up, checks, and determines the number of calls in a round
                    assert all(tensor.eq(size).all() for tensor in tensors), key
                    repeats[key] = max(1, min(200, int(ROUND_SECONDS / seconds_taken)))
                else:
                    seconds.setdefault(key, []).append(seconds_taken / count)
        dist.barrier(group=gloo)
        if rank < 2:
            triads.append(triad(arrays))
        dist.barrier(group=gloo)
    return {
        "seconds": {
            f"{listed[i][0]}|{listed[i][1]}|{b}": times for (i, b), times in seconds.items()
        },
        "triad": triads[1:],
        "crossings": hfreduce.torch.plan()["crossings"],
    }


def timed(tensors: list[torch.Tensor], group: Any, count: int) -> float:
    """Seconds for `count` calls, each as DDP does it: all buckets are started, then waited for."""
    start = time.perf_counter()
    for _ in range(count):
        if len(tensors) == 1:
            dist.all_reduce(tensors[0], group=group)
        else:
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
    return time.perf_counter() - start


def slowest(seconds: float, group: Any) -> float:
    """The maximum over all ranks."""
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor.item()


def triad(arrays: list[torch.Tensor]) -> float:
    """STREAM's a = b + s c on this rank's core, in GB/s of the three arrays."""
    a, b, c = arrays
    start = time.perf_counter()
    torch.add(b, c, alpha=3.0, out=a)
    return 3 * a.nbytes / (time.perf_counter() - start) / 1e9


def summarise(layout: str, ranks: int, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each case: medians, spread and HFReduce's speedup."""
    entries = []
    triad_gbps = sum(statistics.median(value["triad"]) for value in values[:2])
    for name, kind, sizes in cases():
        times = {b: values[0]["seconds"].get(f"{name}|{kind}|{b}") for b in ("hfreduce", "gloo")}
        if not times["hfreduce"] or not times["gloo"]:
            continue
        size_bytes = sum(sizes) * (4 if kind == "float32" else 2)
        hfreduce_seconds, gloo_seconds = (statistics.median(times[b]) for b in ("hfreduce", "gloo"))
        entries.append(
            {
                "layout": layout,
                "case": name,
                "type": kind,
                "bytes": size_bytes,
                "tensors": len(sizes),
                "hfreduce_us": spread(times["hfreduce"]),
                "gloo_us": spread(times["gloo"]),
                "hfreduce_busbw_gbps": 2
                * (ranks - 1)
                / ranks
                * size_bytes
                / hfreduce_seconds
                / 1e9,
                "ratio": gloo_seconds / hfreduce_seconds,
                "ratios": sorted(
                    g / h for g, h in zip(times["gloo"], times["hfreduce"], strict=True)
                ),
                # Every byte of every rank is read once and written once, whatever the algorithm.
                "of_memory_limit": 2 * ranks * size_bytes / (triad_gbps * 1e9) / hfreduce_seconds,
                "triad_gbps": triad_gbps,
                "crossings_per_tree": values[0]["crossings"],
            }
        )
    return entries


def spread(seconds: list[float]) -> dict[str, float]:
    """Microseconds: median and extremes."""
    return {
        "p50": statistics.median(seconds) * 1e6,
        "min": min(seconds) * 1e6,
        "max": max(seconds) * 1e6,
    }


def table(entries: list[dict[str, Any]]) -> str:
    """Formats the table for the terminal."""
    lines = []
    for layout in LAYOUTS:
        rows = [entry for entry in entries if entry["layout"] == layout]
        if not rows:
            continue
        crossings, limit = rows[0]["crossings_per_tree"], rows[0]["triad_gbps"]
        lines.append(f"\n{layout}; zone crossings per tree {crossings}; triad {limit:.1f} GB/s")
        lines.append(
            f"{'tensor':18}{'type':10}{'bytes':>10}{'hfreduce us':>13}{'gloo us':>11}"
            f"{'ratio':>8}{'least … most':>14}{'GB/s':>7}{'of memory':>11}"
        )
        lines.extend(
            f"{row['case']:18}{row['type']:10}{row['bytes']:>10}{row['hfreduce_us']['p50']:>13.0f}"
            f"{row['gloo_us']['p50']:>11.0f}{row['ratio']:>8.1f}"
            f"{row['ratios'][0]:>7.1f}{row['ratios'][-1]:>7.1f}{row['hfreduce_busbw_gbps']:>7.2f}"
            f"{row['of_memory_limit']:>11.0%}"
            for row in rows
        )
    return "\n".join(lines)


def main() -> int:
    """Runs all layouts; exit status 1 if the goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="only gradient buckets and 4 KiB")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build/bench/collectives-layouts.json"
    )
    args = parser.parse_args()
    entries: list[dict[str, Any]] = []
    for name, (layout, transport) in LAYOUTS.items():
        print(f"bench: {name} …", file=sys.stderr, flush=True)
        outcomes = run(
            measure,
            layout,
            args.rounds,
            args.quick,
            timeout_seconds=120,
            deadline_seconds=900,
            environment={"HFREDUCE_TRANSPORT": transport},
        )
        bad = [outcome for outcome in outcomes if outcome.failure or not outcome.answered]
        if bad:
            print(f"bench: rank {bad[0].rank} failed: {bad[0].failure}", file=sys.stderr)
            return 1
        entries += summarise(name, layout.world_size, [outcome.value for outcome in outcomes])
    print(table(entries))
    layout_name, case, kind, goal = GOAL
    reached = next(
        entry["ratio"]
        for entry in entries
        if (entry["layout"], entry["case"], entry["type"]) == (layout_name, case, kind)
    )
    print(f"\n{case}, {layout_name}: {reached:.1f} times Gloo (goal {goal})")
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}
    document = {
        "version": 1,
        "args": {"rounds": args.rounds, "quick": args.quick},
        "machine": machine,
        "goal": {"case": case, "layout": layout_name, "ratio": goal, "reached": reached},
        "results": entries,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0 if reached >= goal else 1


if __name__ == "__main__":
    sys.exit(main())

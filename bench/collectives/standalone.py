"""Figures without peers: kernels compared with memory, the recorder, the wheel and its import."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.collectives.harness import BenchError
from bench.report import ROOT
from bench.rows import Row, row

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PARTS"]

PROGRAM_SECONDS = 600
TRIES = 5
"""Runs of a program in one round; the fastest one counts, because interference only slows down."""
MIB = 1 << 20
JOIN_RANKS = 1024
KERNEL_GOALS = {"of_pairwise": ("x pairwise", 2.0), "of_scalar": ("x scalar", 6.0)}


def kernels(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """One pass over eight inputs with one thread and with two, as hfreduce-kernels measures it."""
    with tempfile.TemporaryDirectory(prefix="hfreduce-bench-") as folder:
        path = Path(folder, "kernels.json")
        program("cargo", "run", "--release", "--locked", "--quiet", "-p", "hfreduce-kernels",
                "--example", "throughput", str(path))  # fmt: skip
        report = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    best = f"{report['isa']} streaming"
    for entry in report["rows"]:
        if entry["way"] != best:
            continue
        title = f"8 inputs, one pass, {entry['type']}"
        goal, cores = float(entry["goal_of_triad"]), entry["threads"]
        share = f"{title}: of triad, {cores} core{'s' * (cores > 1)}"
        rows.append(row(share, "of limit", entry["of_triad"], goal, more=True))
        if cores > 1:
            continue
        rows += [
            row(f"{title}: {words}", "x", entry[key], least, more=True)
            for key, (words, least) in KERNEL_GOALS.items()
        ]
    return rows, report


def recorder(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """Cost of one operation's records, compared with a 4 KiB allreduce of two threads."""
    text = program("cargo", "run", "--release", "--locked", "--quiet", "-p", "hfreduce-engine",
                   "--example", "flight_cost")  # fmt: skip
    numbers = [float(number) for number in re.findall(r": ([0-9.]+) (?:ns|%)", text)]
    if len(numbers) != 3:
        raise BenchError(f"unexpected output of flight_cost: {text}")
    record, reduce, share = numbers
    rows = [
        row("flight recorder: one operation", "ns", [record]),
        row("flight recorder: of a 4 KiB call", "%", [share]),
    ]
    return rows, {"record_ns": record, "allreduce_ns": reduce}


def wheel(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """The package as users install it."""
    with tempfile.TemporaryDirectory(prefix="hfreduce-bench-") as folder:
        uv = ROOT / "build/tools/bin/uv"
        program(str(uv), "build", "--quiet", "--wheel", "--package", "hfreduce", "-o", folder)
        (archive_path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive_path) as archive:
            files = {entry.filename: entry.compress_size for entry in archive.infolist()}
        size = archive_path.stat().st_size
    largest = dict(sorted(files.items(), key=lambda item: -item[1])[:5])
    return [row("wheel", "MiB", [size / MIB], 4.0)], {"bytes": size, "largest": largest}


def imports(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """Additional start time of an interpreter with the package, measured in alternation."""
    programs = {
        "import hfreduce": "import hfreduce",
        "from hfreduce import allreduce": "from hfreduce import allreduce",
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("nothing", *programs)}
    for number in range(rounds + 1):
        best = dict.fromkeys(seconds, math.inf)
        for _ in range(TRIES):
            for name in seconds:
                words = [sys.executable, "-I", "-c", programs.get(name, "pass")]
                start = time.perf_counter()
                subprocess.run(words, check=True, timeout=PROGRAM_SECONDS)
                best[name] = min(best[name], time.perf_counter() - start)
        if number:  # the first round reads the disk
            for name, least in best.items():
                seconds[name].append(least)
    rows = []
    for name in programs:
        pairs = zip(seconds[name], seconds["nothing"], strict=True)
        rows.append(row(name, "ms", [(imported - empty) * 1e3 for imported, empty in pairs], 30.0))
    return rows, {"seconds": seconds}


def join(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Both exchanges of a join through torch's store; this process acts as every rank in turn.

    In a job ranks work in parallel: the time is an upper limit.
    """
    from hfreduce._native import Membership
    from hfreduce.store_rendezvous import StoreRendezvous
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    size = 64 if quick else JOIN_RANKS
    phases = _values(size)
    members = [Membership(rank, range(size), size) for rank in range(size)]
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seconds, bytes_read = [], 0
    for number in range(rounds):
        store = PrefixStore(f"round-{number}", server)
        start = time.perf_counter()
        for phase, values in phases.items():
            for rank in range(1, size):
                store.set(f"hfreduce/{phase}/{rank}", values[rank])
            for rank in range(size):
                rendezvous = StoreRendezvous(store, members[rank])
                rendezvous.exchange(phase, values[rank], PROGRAM_SECONDS)
        seconds.append(time.perf_counter() - start)
        bytes_read = sum(len(store.get(f"hfreduce/{phase}/all/0/0")) for phase in phases)
    rows = [
        row(f"{size} ranks exchange places, endpoints", "s", seconds, 5.0),
        row(f"{size} ranks: bytes per rank to each", "bytes", [bytes_read / size], 64.0),
    ]
    return rows, {"s": seconds, "bytes": bytes_read}


def _values(size: int) -> dict[str, list[str]]:
    """Values of both phases by rank, on nodes with 8 ranks: places and endpoints of the engine."""
    from hfreduce import _native

    nodes = [(f"node-{rank // 8:05}", "AB"[rank * 2 // size]) for rank in range(size)]
    places, endpoints = [], []
    for rank, (node, zone) in enumerate(nodes):
        info = json.loads(_native.Endpoint(rank, size, nodes, b"k" * 32, job="bench").info())
        at = rank // 8
        boot = uuid.UUID(int=random.Random(at).getrandbits(128))  # like a random boot id
        info |= {"host": f"{boot} net:[{4026531840 + at}]", "addresses": [f"10.3.0.{at}"]}
        endpoints.append(json.dumps(info, separators=(",", ":")))
        place = {"node": node, "zone": zone, "address": None}
        description = {"place": place, "job": "bench", "ranks": "0123456789abcdef", "size": size}
        places.append(json.dumps(description | {"bridges": []}))
    return {"place": places, "endpoint": endpoints}


def program(*words: str) -> str:
    """Runs a program of the workspace and returns its output."""
    environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    result = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=PROGRAM_SECONDS, cwd=ROOT,
        env=environment,
    )  # fmt: skip
    if result.returncode:
        raise BenchError(f"{' '.join(words)}: {result.stderr.strip()[-2000:]}")
    return result.stdout


PARTS: dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]] = {
    "kernels": kernels, "recorder": recorder, "join": join, "imports": imports, "wheel": wheel,
}  # fmt: skip

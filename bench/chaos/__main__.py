"""`make chaos`: runs of a load with faults on real processes; nothing acknowledged may be lost.

A cluster of three etcd members, two metadata services, two mgmtds and three storage services runs
on this machine. In each run, several client processes change names and files, one fault is
injected, and then everything that the clients saw is checked:

- every object is linearizable, and every acknowledged change and write is there;
- no client was without a completed operation for longer than the limits of `faults`;
- every service and replica serves again without an operator, and `threefs fsck` and
  `threefs fsck --chunks` find nothing.

    python -m bench.chaos [--runs 20] [--seed 1] [--duration 8] [--faults kill-meta stop-etcd …]

The seed of a run decides its faults and the operations of each client, so `--seed N --runs 1`
repeats it; the moments at which processes meet are the machine's. Logs and histories of a run that
failed stay in `build/chaos`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from threefs.errors import ThreeFSError

from bench.chaos.cluster import ChaosCluster, ChaosError
from bench.chaos.faults import FAULTS
from bench.chaos.gaps import KINDS
from bench.chaos.run import Load, run
from bench.report import OUTPUT, ROOT, machine, say, utc, write_json
from programs import binaries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.chaos.verdict import Result

FOLDER = ROOT / "build" / "chaos"
RUNS_OF_A_CLUSTER = 25
NODE_FAILURE_MS = 1000
START_ATTEMPTS = 3


def main() -> int:
    """Carries out the runs; 0 if nothing was lost, violated or stuck."""
    args = arguments()
    load = Load(
        clients=args.clients, name_workers=args.names, data_workers=args.data,
        seconds=args.duration, faults=args.faults_per_run,
    )  # fmt: skip
    # An end of this process must not leave a cluster behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    results: list[Result] = []
    started = time.monotonic()
    cluster: ChaosCluster | None = None
    try:
        for number in range(args.runs):
            seed = args.seed + number
            if cluster is None:
                cluster, mounts = start(folder, number, args)
            result = run(cluster, mounts, seed, load, args.faults, folder / f"run-{seed}")
            results.append(result)
            say(f"{number + 1:4}/{args.runs} {described(result)}")
            write_json(args.output, document(results, load, time.monotonic() - started))
            if result.failures or (number + 1) % RUNS_OF_A_CLUSTER == 0:
                cluster.stop()
                if not result.failures:
                    shutil.rmtree(cluster.folder)
                cluster = None
    finally:
        if cluster is not None:
            cluster.stop()
    show(results)
    return 1 if any(result.failures for result in results) else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds of load of each run")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--names", type=int, default=5, help="workers of each on shared names")
    parser.add_argument("--data", type=int, default=2, help="workers of each on shared files")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="FAULT")
    parser.add_argument("--faults-per-run", type=int, default=1)
    parser.add_argument("--metadata", choices=("etcd", "embedded"), default="etcd")
    parser.add_argument("--no-mounts", action="store_true", help="files through the Python client")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, default=OUTPUT / "chaos.json")
    args = parser.parse_args()
    if args.metadata == "embedded":
        args.faults = [name for name in args.faults if not name.endswith("etcd")]
    return args


def start(folder: Path, number: int, args: argparse.Namespace) -> tuple[ChaosCluster, list[Path]]:
    """A new cluster and its mounts; on a busy machine the first attempt may be too slow."""
    options = etcd_options() if args.metadata == "etcd" else ["--metadata", "embedded"]
    for attempt in range(START_ATTEMPTS):
        say(f"starting a cluster ({args.metadata})")
        cluster = None
        try:
            cluster = ChaosCluster(folder / f"cluster-{number}-{attempt}", options, NODE_FAILURE_MS)
            return cluster, cluster.mount(2) if can_mount() and not args.no_mounts else []
        except (ChaosError, ThreeFSError) as error:
            say(str(error))
            if cluster is not None:
                cluster.stop()
    raise SystemExit("no cluster could be started")


def etcd_options() -> list[str]:
    """Options of a cluster whose metadata is in three etcd members."""
    program = os.environ.get("FIRE_FLYER_ETCD") or str(binaries.require("etcd")["etcd"])
    counts = ["--metas", "2", "--mgmtds", "2"]
    return ["--metadata", "etcd", "--etcd-binary", program, *counts]


def can_mount() -> bool:
    """Whether this process can mount."""
    return os.geteuid() == 0 and Path("/dev/fuse").exists()


def described(result: Result) -> str:
    """A run in one line."""
    longest = " ".join(
        f"{kind} {gap.one_client:.1f}" for kind, gap in result.gaps.items() if gap.one_client > 0
    )
    verdict = "FAILED" if result.failures else "slow" if result.too_long else "ok"
    text = (
        f"{verdict}  seed {result.seed}: {', '.join(result.faults):<22} "
        f"{result.operations:6} operations, gaps {longest}, whole after "
        f"{result.recovery_seconds:.1f} s, load {result.load_average:.1f}, "
        f"stall {result.stall_seconds:.1f} s"
    )
    return "\n".join([text, *(f"    {each}" for each in result.failures)])


def document(results: Sequence[Result], load: Load, seconds: float) -> dict[str, Any]:
    """Everything, for `chaos.json`."""
    return {
        "at": utc(),
        "machine": machine(),
        "load": {name: getattr(load, name) for name in load.__dataclass_fields__},
        "seconds": round(seconds, 1),
        "runs": len(results),
        "failed": sum(bool(result.failures) for result in results),
        "operations": sum(result.operations for result in results),
        "acknowledged": sum(result.acknowledged for result in results),
        "results": [result.document() for result in results],
    }


def show(results: Sequence[Result]) -> None:
    """A table by fault."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds = {fault.partition(" ")[0] + " " + kind_of(fault) for fault in result.faults}
        groups[" + ".join(sorted(kinds))].append(result)
    columns = [f"{kind}, s" for kind in KINDS]
    table = Table("fault", "runs", "failed", "operations", *columns, "over limit")
    for name, group in sorted(groups.items()):
        longest = [max((r.gaps[k].one_client for r in group if k in r.gaps), default=0.0)
                   for k in KINDS]  # fmt: skip
        table.add_row(
            name, str(len(group)), str(sum(bool(r.failures) for r in group)),
            f"{sum(r.operations for r in group):,}", *(f"{gap:.1f}" for gap in longest),
            str(sum(bool(r.too_long) for r in group)),
        )  # fmt: skip
    table.add_row(
        "all", str(len(results)), str(sum(bool(r.failures) for r in results)),
        f"{sum(r.operations for r in results):,}", *[""] * len(KINDS),
        str(sum(bool(r.too_long) for r in results)),
    )  # fmt: skip
    Console().print(table)


def kind_of(fault: str) -> str:
    """`meta` of `kill meta-2`."""
    return fault.partition(" ")[2].partition("-")[0]


if __name__ == "__main__":
    sys.exit(main())

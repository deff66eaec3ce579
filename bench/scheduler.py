"""Benchmark of the operator and kube-scheduler's gangs on a real API server with kwok nodes.

The operator is one real process; kube-scheduler runs with its gang scheduling on and its client
limits raised, in the same rounds. Times and writes are the API server's own (its audit log).

    python -m bench.scheduler [--only gang,gangs] [--missing] [--quick] [--rounds 3]

A run can be split into several: earlier results stay in the file, `--only` measures some
parts, and `--missing` those that the file does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.report import OUTPUT, machine, read_json, say, utc, write_json
from bench.sched.cold_start import ColdStart, History
from bench.sched.figures import Figure, document, table
from bench.sched.node_simulator import NodeSimulator
from bench.sched.shares import Shares
from bench.sched.starts import Sizes, Starts
from bench.sched.testbed import Testbed, TestbedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NAMES: Final = ("gang", "gangs", "small", "reclaim", "node", "leader", "cold")
QUICK: Final = Sizes(nodes=40, nodes_per_leaf=10, gang=32, gangs=6, gang_of=5, small=30)
QUICK_HISTORY: Final = History(nodes=100, queued=200, ended=50)


@dataclass(slots=True)
class Record:
    """The results so far; they are kept when a later part fails."""

    path: Path
    quick: bool
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    """Those that this run has measured, and when."""

    def missing(self, names: list[str]) -> list[str]:
        """Parts that the file does not have in this size."""
        parts_before = read_json(self.path).get("parts", {})
        return [name for name in names if self._label(name) not in parts_before]

    def _label(self, name: str) -> str:
        return f"{name}, quick" if self.quick else name

    async def add(
        self, name: str, part: Callable[[], Awaitable[None]], *details: dict[str, Any]
    ) -> None:
        """Run a part, print its results and write them."""
        before = [len(figure.values) for figure in self.figures]
        await part()
        for figure, count in zip(self.figures, before, strict=True):
            if len(figure.values) > count:
                peer = f", peer {figure.peer[-1]:.3g}" if figure.peer else ""
                say(f"  {figure.name}: {figure.values[-1]:.3g} {figure.unit}{peer}")
        for part_details in details:
            self.details |= part_details
        self.parts[self._label(name)] = utc()
        self._write()

    def _write(self) -> None:
        """Write the figures and keep the file's other figures."""
        config = machine() | {
            "python": platform.python_version(),
            "quick": self.quick,
            "time": utc(),
            "load": round(os.getloadavg()[0], 1),
        }
        report = document(config, [figure for figure in self.figures if figure.values])
        for figure in report["figures"].values():
            figure["config"] = config
        before = read_json(self.path)
        report["parts"] = before.get("parts", {}) | self.parts
        report["figures"] = before.get("figures", {}) | report["figures"]
        report["details"] = before.get("details", {}) | self.details
        write_json(self.path, report)


async def measure(arguments: argparse.Namespace, record: Record) -> None:
    """Run all requested parts."""
    if set(arguments.only) - {"cold"}:
        await _with_nodes(arguments, record)
    if "cold" in arguments.only:
        await _cold(arguments, record)


async def _with_nodes(arguments: argparse.Namespace, record: Record) -> None:
    sizes = QUICK if arguments.quick else Sizes()
    say(f"starting a control plane with {sizes.nodes} nodes")
    testbed = Testbed(
        arguments.folder,
        nodes=sizes.nodes,
        nodes_per_leaf=sizes.nodes_per_leaf,
        profile=arguments.profile,
        server_profiles=arguments.profile_server,
    )
    async with testbed, NodeSimulator(testbed) as simulator:
        await testbed.start_leader()
        starts, shares = Starts(testbed, simulator, sizes), Shares(testbed, simulator, sizes)
        record.figures += starts.figures + shares.figures
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "gang": starts.gang_round,
            "gangs": starts.gangs_round,
            "small": starts.small_round,
            "reclaim": shares.reclaim_round,
            "node": shares.node_round,
            "leader": shares.leader_round,
        }
        for number in range(arguments.rounds):
            for name, part in parts.items():
                if name in arguments.only:
                    say(f"round {number + 1} of {arguments.rounds}: {name}")
                    await record.add(name, part, starts.details, shares.details)


async def _cold(arguments: argparse.Namespace, record: Record) -> None:
    history = QUICK_HISTORY if arguments.quick else History()
    say(f"starting a control plane; {history.jobs:,} jobs and {history.pods:,} pods go into etcd")
    testbed = Testbed(arguments.folder, nodes=0, nodes_per_leaf=1, profile=arguments.profile)
    async with testbed:
        cold = ColdStart(testbed, history, arguments.reference)
        await cold.load()
        record.figures += cold.figures
        for number in range(arguments.rounds):
            say(f"round {number + 1} of {arguments.rounds}: cold")
            await record.add("cold", cold.round, cold.details)


def main() -> int:
    """Measure, print a table, write the JSON. 1: an expected state was not reached; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scheduler", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of {','.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work at all")
    parser.add_argument("--missing", action="store_true", help="of these, what the file has not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--reference", type=Path, help="source tree of another operator, for cold starts in turns"
    )
    parser.add_argument("--folder", type=Path, default=OUTPUT / "sched-cluster")
    parser.add_argument("--output", type=Path, default=OUTPUT / "sched.json")
    parser.add_argument("--profile", type=Path, help="cProfile of the operators into FILE.N")
    parser.add_argument(
        "--profile-server", type=Path, help="pprof of the API server into this folder, for starts"
    )
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    if arguments.reference is not None:
        arguments.reference = arguments.reference.resolve()
    if unknown := set(arguments.only) - set(NAMES):
        parser.error(f"--only {','.join(sorted(unknown))}: choose of {','.join(NAMES)}")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    record = Record(arguments.output, arguments.quick)
    if arguments.missing:
        arguments.only = record.missing(arguments.only)
    status = 0
    try:
        asyncio.run(measure(arguments, record))
    except TestbedError as error:
        print(f"bench-sched: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("bench-sched: interrupted; the cluster is removed", file=sys.stderr)
        status = 130
    if any(figure.values for figure in record.figures):
        print("\n".join(table(record.figures)))
        print(f"written to {record.path}")
    return status


if __name__ == "__main__":
    sys.exit(main())

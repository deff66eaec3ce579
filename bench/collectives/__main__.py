"""Benchmark of HFReduce and its peers in the same run: prints a table and writes JSON.

    python -m bench.collectives [--only pair,tcp] [--rounds 5] [--quick] [--output FILE]

Each part writes its results as soon as they are available, so a run can be split into several.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench import report
from bench.collectives import layouts, machines, rows, speed, standalone

PARTS = speed.PARTS | layouts.PARTS | standalone.PARTS | machines.PARTS


def main() -> int:
    """Measures; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--output", type=Path, default=report.OUTPUT / "collectives.json")
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"--only {unknown[0]}: must be of {', '.join(PARTS)}")
    # Signals that end this program must end its ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    all_rows: list[rows.Row] = []
    for name in names:
        report.say(f"{name} …")
        started = time.monotonic()
        part_rows, details = PARTS[name](2 if args.quick else args.rounds, quick=args.quick)
        all_rows += part_rows
        write(args.output, name, part_rows, details, quick=args.quick)
        report.say(f"{name}: {time.monotonic() - started:.0f} s")
    print(rows.table(all_rows))
    missed_rows = [row.name for row in all_rows if row.reached is False]
    if missed_rows:
        print(f"\nmissed: {'; '.join(missed_rows)}")
    # A quick run only shows that everything works; its figures are not valid measurements.
    return 1 if missed_rows and not args.quick else 0


def write(
    path: Path, name: str, part_rows: list[rows.Row], details: dict[str, Any], *, quick: bool
) -> None:
    """Adds one part's figures to the file and keeps those of the other parts."""
    document = report.read_json(path) | {"version": 2, "machine": report.machine()}
    parts = document.setdefault("parts", {})
    parts[name] = {
        "at": report.utc(),
        "quick": quick,
        "rows": [row.document() for row in part_rows],
        "details": details,
    }
    report.write_json(path, document)


if __name__ == "__main__":
    sys.exit(main())

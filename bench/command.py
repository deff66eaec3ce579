"""Command line of benchmarks in parts: runs them, prints a table, writes JSON after each part."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import report, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["run_parts"]


def run_parts(
    parts: Mapping[str, Callable[..., tuple[list[rows.Row], dict[str, Any]]]],
    output: Path,
    description: str | None,
) -> int:
    """Measures the parts that the command line names; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    parser.add_argument("--only", default=",".join(parts), help=f"some of {', '.join(parts)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--output", type=Path, default=output)
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = [name for name in names if name not in parts]
    if unknown:
        parser.error(f"--only {unknown[0]}: must be of {', '.join(parts)}")
    # Signals that end this program must end its ranks, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    all_rows: list[rows.Row] = []
    for name in names:
        report.say(f"{name} …")
        started = time.monotonic()
        part_rows, details = parts[name](2 if args.quick else args.rounds, quick=args.quick)
        all_rows += part_rows
        _write(args.output, name, part_rows, details, quick=args.quick)
        report.say(f"{name}: {time.monotonic() - started:.0f} s")
    print(rows.table(all_rows))
    missed_rows = [row.name for row in all_rows if row.reached is False]
    if missed_rows:
        print(f"\nmissed: {'; '.join(missed_rows)}")
    # A quick run only shows that everything works; its figures are not valid measurements.
    return 1 if missed_rows and not args.quick else 0


def _write(
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

"""Benchmark of HFReduce and its peers in the same run: prints a table and writes JSON.

    python -m bench.collectives [--only pair,tcp] [--rounds 5] [--quick] [--output FILE]

Each part writes its results as soon as they are available, so a run can be split into several.
"""

from __future__ import annotations

import sys

from bench import report
from bench.collectives import layouts, machines, speed, standalone
from bench.command import run_parts

PARTS = speed.PARTS | layouts.PARTS | standalone.PARTS | machines.PARTS

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, report.OUTPUT / "collectives.json", __doc__))

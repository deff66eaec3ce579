"""Benchmark of training steps: prints a table and writes JSON.

    python -m bench.training [--only gpt,wire] [--rounds 5] [--quick] [--output FILE]

Variants take turns in each round, so that a slow minute of the machine affects all of them.
"""

from __future__ import annotations

import sys

from bench import report
from bench.command import run_parts
from bench.training.parts import PARTS

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, report.OUTPUT / "training.json", __doc__))

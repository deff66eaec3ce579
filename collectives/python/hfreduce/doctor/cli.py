"""`hfreduce-doctor`: the program."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hfreduce import _native
from hfreduce.doctor.checks import examine
from hfreduce.doctor.machine import Finding, Layout, Machine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

VERSION = 1
"""Version of the JSON format."""

STATUSES = {"ok": 0, "warning": 1, "problem": 2}
USAGE = 64
"""As sysexits.h has it: 2 is taken by problems."""

_EPILOG = """\
examples:
  hfreduce-doctor                       for the ranks of the launcher's environment, else for 8
  hfreduce-doctor -g 4 --world-size 64 --peer 10.0.0.7
  hfreduce-doctor -o json | jq '.findings[] | select(.status != "ok")'
  kubectl exec POD -c trainer -- hfreduce-doctor -g 8     in the very container that a job gets

exit status: 0 nothing to change; 1 warnings: it works, not as well as it could; 2 problems: it will
fail; 64 the command line cannot be used
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exits with the status of usage errors."""
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = _Parser(
        prog="hfreduce-doctor",
        description="What of this machine is in the way of fast collectives, and what to change. "
        "Reads /proc and /sys; changes nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-g", "--ranks", type=int, metavar="N", help="ranks on this machine")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of the whole job")
    parser.add_argument("--peer", metavar="ADDRESS", help="IPv4 address of another machine")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    machine = machine or Machine(
        Path("/"),
        os.environ,
        _native.instruction_set(),
        _native.best_instruction_set(),
        _native.without_gdrcopy(os.environ.get("HFREDUCE_GDRCOPY") or None),
        _native.reached_at,
    )
    ranks, world = options.ranks, options.world_size
    if ranks is None:
        ranks = _from(machine, "LOCAL_WORLD_SIZE") or 8
    if world is None:
        world = max(_from(machine, "WORLD_SIZE"), ranks)
    if not 1 <= ranks <= world:
        parser.error(f"-g {ranks} of --world-size {world}: at least 1, at most all")
    findings = examine(machine, Layout(ranks, world, options.peer))
    worst = max(findings, key=lambda finding: STATUSES[finding.status]).status
    if options.output == "json":
        listed = [asdict(finding) for finding in findings]
        print(json.dumps({"version": VERSION, "status": worst, "findings": listed}, indent=1))
    else:
        print(_text(findings))
    return STATUSES[worst]


def _from(machine: Machine, name: str) -> int:
    value = machine.environment.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def _text(findings: Sequence[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  → {finding.remedy}")
    count = {name: sum(f.status == name for f in findings) for name in STATUSES}
    summary = ", ".join(f"{count[name]} {name}" for name in reversed(STATUSES) if count[name])
    return "\n".join([*lines, summary])

"""``haiscale`` and ``python -m haiscale``: tools of the training layers."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from haiscale.plan import __main__ as plan
from haiscale.trace import __main__ as trace

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "run"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="haiscale", description="tools of HaiScale")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_to(commands)
    trace.add_to(commands)
    options = parser.parse_args(arguments)
    return int(options.command(options))


def run() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()

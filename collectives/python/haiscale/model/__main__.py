"""``python -m haiscale.model figures -o FOLDER``: the paper's Figures 8 and 9 from constants.

Writes figure8.svg, figure9.svg and figures8-9.json, and prints the claims. Exit statuses: 0 the
files are written, 2 the arguments are invalid or the folder cannot be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from haiscale.model.figures.draw import picture
from haiscale.model.figures.report import FIGURES, document, make, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from haiscale.model.figures.report import Report

__all__ = ["main"]

WRITTEN, USAGE = 0, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.output.mkdir(parents=True, exist_ok=True)  # refused before the work, not after it
        reports = [make(figure, vary=options.sensitivity) for figure in FIGURES]
        _write(options.output, reports)
    except OSError as error:
        sys.stderr.write(f"haiscale.model: {error}\n")
        return USAGE
    sys.stdout.write(table(reports))
    return WRITTEN


def _write(folder: Path, reports: list[Report]) -> None:
    files = {
        "figure8.svg": picture(reports[:2]),
        "figure9.svg": picture(reports[2:]),
        "figures8-9.json": json.dumps(document(reports), indent=1) + "\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="haiscale.model", description="models of training steps on the paper's cluster"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    figures = commands.add_parser(
        "figures",
        help="draw the paper's Figures 8 and 9",
        epilog="exit status: 0 written, 2 invalid arguments or folder",
    )
    figures.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER",
        help="folder for figure8.svg, figure9.svg and figures8-9.json",
    )  # fmt: skip
    figures.add_argument(
        "--no-sensitivity", dest="sensitivity", action="store_false",
        help="leave out how each assumption moves the results (faster)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())

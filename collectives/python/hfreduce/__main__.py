"""``hfreduce status`` and ``python -m hfreduce status``: inspects running jobs of this machine.

Exit statuses of `status`: 0 nothing is wrong, 1 a group is stuck, stopped, dead, broken or
disagrees, 2 the arguments are invalid or a process cannot be inspected, 3 no group was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hfreduce import exposition, flight, status

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "run"]

FINE, BAD, USAGE, NONE = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    while True:
        try:
            status_groups, recorders = _look(options)
        except (PermissionError, ProcessLookupError) as error:
            sys.stderr.write(f"hfreduce status: {error}\n")
            return USAGE
        _show(status_groups, recorders, options.output, clear=options.watch is not None)
        if options.watch is None:
            break
        try:
            time.sleep(options.watch)
        except KeyboardInterrupt:
            break
    if not status_groups:
        return NONE
    return BAD if any(group.verdict in status.BAD for group in status_groups) else FINE


def _look(options: argparse.Namespace) -> tuple[list[status.Group], list[flight.Recorder]]:
    if options.pid:
        recorders = [recorder for pid in options.pid for recorder in flight.of_process(pid)]
        # Its peers are in the same groups: they are shown with it.
        groups = {recorder.data["group"] for recorder in recorders}
        own = {(r.data["group"], r.data["rank"]) for r in recorders}
        all_recorders = flight.find(options.run_dir or flight.folders())
        recorders += [
            r
            for r in all_recorders
            if r.data["group"] in groups and (r.data["group"], r.data["rank"]) not in own
        ]
    else:
        recorders = list(flight.find(options.run_dir or flight.folders()))
    status_groups = status.groups(recorders, options.stuck_after, ended=options.ended)
    return [group for group in status_groups if options.job in (None, group.job)], recorders


def _show(
    status_groups: list[status.Group], recorders: list[flight.Recorder], output: str, *, clear: bool
) -> None:
    if output == "json":
        text = json.dumps({"groups": [group.as_json() for group in status_groups]})
    elif output == "prometheus":
        text = exposition.prometheus(status_groups, recorders)
    elif output == "trace":
        text = exposition.trace(status_groups, recorders)
    elif status_groups:
        text = "\n\n".join(status.table(group) for group in status_groups)
    else:
        text = "no running rank of HFReduce on this machine, or none of this user"
    if clear and sys.stdout.isatty():
        sys.stdout.write("\033[H\033[J")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hfreduce", description="tools of HFReduce")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser(
        "status",
        help="show blocked ranks in the jobs of this machine",
        epilog="exit status: 0 fine, 1 stuck, stopped, dead, broken or mismatch, 2 usage, 3 no job",
    )
    show.add_argument("--job", help="only this job")
    show.add_argument("--pid", type=int, action="append", help="only the groups of this process")
    show.add_argument(
        "--run-dir", type=Path, action="append", metavar="FOLDER",
        help="folder of the recorders (default: HFREDUCE_RUN_DIR, or the default folders)",
    )  # fmt: skip
    show.add_argument(
        "--stuck-after", type=float, default=5.0, metavar="SECONDS",
        help="time in one operation after which a rank counts as stuck (default: 5)",
    )  # fmt: skip
    show.add_argument("--ended", action="store_true", help="also groups whose ranks have all ended")
    show.add_argument(
        "-o", "--output", choices=("table", "json", "prometheus", "trace"), default="table",
        help="trace: the last operations of every rank here, for chrome://tracing or Perfetto",
    )  # fmt: skip
    show.add_argument(
        "--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="refresh every SECONDS"
    )
    return parser


def run() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()

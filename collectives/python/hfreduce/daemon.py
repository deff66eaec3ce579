"""`hfreduced`: one process that has the connections and runs the reductions of a machine's ranks.

Ranks connect to it if HFREDUCE_DAEMON names its socket; nothing else in a program changes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

STOPPED, FAILED = 0, 1
LOOK_SECONDS = 0.5
"""Interval between checks of the stop signal; connections are accepted immediately."""
RANKS_MAX = 128

_EPILOG = """\
examples:
  hfreduced --socket /run/user/1000/hfreduced.sock
  HFREDUCE_DAEMON=/run/user/1000/hfreduced.sock torchrun --nproc-per-node 8 train.py
  hfreduced --socket /shared/hfreduced.sock --mode 666     in a volume that only one pod has
  hfreduce status                                          blocked ranks, as without a daemon

Every process that may open the socket may use it: set its mode and its folder accordingly. A rank
that ends, breaks the protocol or is stopped breaks only its own group, whose other ranks report
it. When hfreduced ends, every rank that it serves raises a CollectiveError that names it, and so
does every rank of their groups on other machines.

exit status: 0 stopped by SIGTERM or SIGINT, 1 cannot listen, 2 the command line cannot be used
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    options = _parser().parse_args(arguments)
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stop.append(received))
    try:
        daemon = _native.Daemon(options.socket, options.mode, options.ranks_max, options.memory_max)
    except OSError as error:
        sys.stderr.write(f"hfreduced: {error}\n")
        return FAILED
    sys.stderr.write(f"hfreduced: process {os.getpid()} listens at {options.socket}\n")
    try:
        while not stop:
            daemon.accept(LOOK_SECONDS)
    except OSError as error:
        sys.stderr.write(f"hfreduced: {options.socket}: {error}\n")
        return FAILED
    finally:
        daemon.close()
    return STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hfreduced",
        description="Runs the HFReduce part of this machine's ranks in one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own = os.environ.get("HFREDUCE_DAEMON")
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", default=own and Path(own), required=not own,
        help="where to listen (default: HFREDUCE_DAEMON)",
    )  # fmt: skip
    parser.add_argument(
        "--mode", type=_mode, default=0o600, metavar="OCTAL",
        help="who may open the socket, as chmod has it (default: 600, this user)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks-max", type=_ranks, default=RANKS_MAX, metavar="N",
        help="ranks of one user that are served at a time, and three times as many of all users; "
        f"more are refused (default: {RANKS_MAX})",
    )  # fmt: skip
    parser.add_argument(
        "--memory-max", type=_memory, metavar="MIB",
        help="for a daemon that several users share: memory that ranks of all users may cause it "
        "to use, in MiB; those of one user may have half of it and of the descriptors, and a group "
        "that wants more gets an error (default: no limit, for a daemon of one user)",
    )  # fmt: skip
    return parser


def _mode(text: str) -> int:
    if not re.fullmatch("0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(
            f"invalid mode {text!r}: expected octal digits, for example 600"
        )
    return int(text, 8)


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 4096):
        raise argparse.ArgumentTypeError(f"invalid number {text!r}: expected 1 to 4096")
    return int(text)


def _memory(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1 << 30):
        raise argparse.ArgumentTypeError(f"invalid number {text!r}: expected 1 to {1 << 30}")
    return int(text) << 20


if __name__ == "__main__":
    sys.exit(main())

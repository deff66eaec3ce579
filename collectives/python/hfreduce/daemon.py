"""`hfreduced`: one process that has the connections and makes the sums of a machine's ranks.

Ranks come to it when HFREDUCE_DAEMON names its socket; nothing else in a program changes.
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
"""How often it looks whether it was told to stop; whoever comes is let in at once."""
RANKS_MAX = 128

_EPILOG = """\
examples:
  hfreduced --socket /run/user/1000/hfreduced.sock
  HFREDUCE_DAEMON=/run/user/1000/hfreduced.sock torchrun --nproc-per-node 8 train.py
  hfreduced --socket /shared/hfreduced.sock --mode 666     in a volume that only one pod has
  hfreduce status                                          who waits for whom, as without it

Whoever may open the socket may use it: its mode and its folder say who. A rank that ends, breaks
the protocol or is stopped ends its own group, whose survivors name it; other groups go on. When
hfreduced ends, every rank that it serves raises a CollectiveError that names it, and so does every
rank of their groups elsewhere.

exit status: 0 told to stop (SIGTERM, SIGINT), 1 cannot listen, 2 the command line cannot be used
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    given = _parser().parse_args(arguments)
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda told, _frame: stop.append(told))
    try:
        daemon = _native.Daemon(given.socket, given.mode, given.ranks_max, given.memory_max)
    except OSError as error:
        sys.stderr.write(f"hfreduced: {error}\n")
        return FAILED
    sys.stderr.write(f"hfreduced: process {os.getpid()} listens at {given.socket}\n")
    try:
        while not stop:
            daemon.accept(LOOK_SECONDS)
    except OSError as error:
        sys.stderr.write(f"hfreduced: {given.socket}: {error}\n")
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
        raise argparse.ArgumentTypeError(f"{text!r} is no mode, as 600 is")
    return int(text, 8)


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 4096):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 4096")
    return int(text)


def _memory(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1 << 30):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {1 << 30}")
    return int(text) << 20


if __name__ == "__main__":
    sys.exit(main())

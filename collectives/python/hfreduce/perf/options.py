"""The command line of `hfreduce-perf`, with the option names of nccl-tests where they exist."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfreduce.perf import formats, oracle
from hfreduce.perf.workloads import COLLECTIVES, Collective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hfreduce.perf.formats import Format

__all__ = ["AVERAGES", "Options", "parse"]

AVERAGES = ("rank0", "avg", "min", "max")
RANKS_MAX = 120
"""Limit of the engine on one machine."""

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.IGNORECASE)

_EXAMPLES = """\
examples:
  hfreduce-perf                            8 ranks on this machine, 4 KiB to 64 MiB
  hfreduce-perf -g 4 -b 8 -e 128M -f 2 -d bf16
  hfreduce-perf alltoall -g 4 -b 1M -e 1M -n 100 -J result.json
  hfreduce-perf -g 8 --nodes 4 --zones 2   the same over TCP: four simulated nodes, two zones
  hfreduce-perf --tensors 46 -b 184M -e 184M   one call over 46 tensors
in a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set; all ranks share a key):
  HFREDUCE_KEY_FILE=/secret/key hfreduce-perf -b 1M -e 1G -f 4

columns: size and count as in nccl-tests; time of one operation; algbw = size / time; busbw = what
each rank's link carries for it; #wrong = elements that differ from exact arithmetic, rounded once;
limit = share of the memory bandwidth: the bytes that any algorithm must read and write here, per
second, over the bandwidth of a triad before the row. Above 100 %, data came from caches.

exit status: 0 all results right; 1 wrong results; 2 the command line or the environment cannot be
used, nothing was measured; 3 a rank failed or ended; 130 interrupted
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a measurement and of its output."""

    collective: Collective
    ranks: int | None
    """Ranks to start here; None: join the launcher's, or start eight."""
    nodes: int
    zones: int
    sizes: tuple[int, ...]
    kinds: tuple[Format, ...]
    ops: tuple[str, ...]
    root: int
    iterations: int
    warmup: int
    tensors: int
    check: bool
    average: str
    timeout_seconds: float
    json: str | None
    trace: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line; ends the program with status 2 where it makes no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.maxbytes < options.minbytes:
        parser.error(f"-e {options.maxbytes} is smaller than -b {options.minbytes}")
    if options.stepfactor is not None and options.stepbytes is not None:
        parser.error("-f and -i exclude each other")
    kinds = _kinds(parser, options.datatype)
    collective = COLLECTIVES[options.collective]
    ops = oracle.OPERATIONS if options.op == "all" else (options.op,)
    if not collective.reduces:
        ops = ("sum",)
    elif not any(oracle.supports(kind, op) for kind in kinds for op in ops):
        parser.error(f"-o {options.op} is not defined for {options.datatype}")
    if options.tensors > 1 and collective.name != "allreduce":
        parser.error("--tensors goes with allreduce")
    if options.nodes < options.zones:
        parser.error(f"--zones {options.zones} needs --nodes {options.zones} or more")
    ranks = options.ranks
    if ranks is None and options.nodes > 1:
        ranks = 8
    if ranks is not None and ranks % options.nodes:
        parser.error(f"{ranks} ranks cannot be spread evenly over --nodes {options.nodes}")
    return Options(
        collective=collective,
        ranks=ranks,
        nodes=options.nodes,
        zones=options.zones,
        sizes=tuple(
            _sizes(options.minbytes, options.maxbytes, options.stepfactor, options.stepbytes)
        ),
        kinds=kinds,
        ops=ops,
        root=options.root,
        iterations=options.iters,
        warmup=options.warmup_iters,
        tensors=options.tensors,
        check=bool(options.check),
        average=options.average,
        timeout_seconds=options.timeout,
        json=options.json,
        trace=options.trace,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hfreduce-perf",
        description="How fast HFReduce's collectives are here, whether their results are right, "
        "and how near they come to what the memory allows.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("collective", nargs="?", default="allreduce", type=_collective, metavar="COLLECTIVE",
        help=f"one of {', '.join(COLLECTIVES)} (default: allreduce)")  # fmt: skip
    add("-g", "--ranks", type=_Whole(1, RANKS_MAX), metavar="N",
        help="ranks to start on this machine (default: join the launcher's, else 8)")  # fmt: skip
    add("--nodes", type=_Whole(1, RANKS_MAX), default=1, metavar="N",
        help="pretend that they run on N machines, which talk over TCP (default: 1)")  # fmt: skip
    add("--zones", type=_Whole(1, 16), default=1, metavar="N",
        help="pretend that the machines are in N zones (default: 1)")  # fmt: skip
    add("-b", "--minbytes", type=_size, default=4 << 10, metavar="SIZE",
        help="the smallest size; 8, 4K, 32M, 1G (default: 4K)")  # fmt: skip
    add("-e", "--maxbytes", type=_size, default=64 << 20, metavar="SIZE",
        help="the largest size (default: 64M)")  # fmt: skip
    add("-f", "--stepfactor", type=_Whole(2, 1 << 20), metavar="N",
        help="each size is N times the one before (default: 4)")  # fmt: skip
    add("-i", "--stepbytes", type=_size, metavar="SIZE",
        help="the difference between consecutive sizes")  # fmt: skip
    add("-d", "--datatype", default="float32", metavar="TYPE",
        help=f"one of {', '.join(formats.TYPES)}, short names as bf16 and fp16, or all "
        "(default: float32)")  # fmt: skip
    add("-o", "--op", choices=(*oracle.OPERATIONS, "all"), default="sum",
        help="the reduction (default: sum)")  # fmt: skip
    add("-r", "--root", type=_Whole(0, 65535), default=0, metavar="RANK",
        help="of broadcast, reduce, gather and scatter (default: 0)")  # fmt: skip
    add("-n", "--iters", type=_Whole(1, 10**7), default=20, metavar="N",
        help="operations that are timed for each row (default: 20)")  # fmt: skip
    add("-w", "--warmup_iters", type=_Whole(0, 10**7), default=5, metavar="N",
        help="operations before those (default: 5)")  # fmt: skip
    add("-c", "--check", type=_Whole(0, 1), default=1, metavar="0|1",
        help="compare one more operation of each row with exact numbers (default: 1)")  # fmt: skip
    add("-a", "--average", type=_average, default="max", metavar="WHOSE",
        help="the time of a row is that of 0 rank0, 1 avg, 2 min or 3 max of all ranks "
        "(default: max)")  # fmt: skip
    add("-T", "--timeout", type=_seconds, default=60.0, metavar="SECONDS",
        help="an operation that takes longer fails, naming who is late (default: 60)")  # fmt: skip
    add("--tensors", type=_Whole(1, 100_000), default=1, metavar="N",
        help="one allreduce over N tensors of together this size (default: 1)")  # fmt: skip
    add("-J", "--json", metavar="FILE",
        help="also write the results as JSON; - is stdout, in place of the table")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="write every timed operation of every rank as a Chrome trace (chrome://tracing, "
        "Perfetto)")  # fmt: skip
    return parser


def _sizes(least: int, most: int, factor: int | None, step: int | None) -> list[int]:
    sizes = [least]
    while True:
        following = sizes[-1] + step if step else max(sizes[-1], 1) * (factor or 4)
        if following > most or following == sizes[-1]:
            return sizes
        sizes.append(following)


def _kinds(parser: argparse.ArgumentParser, name: str) -> tuple[Format, ...]:
    if name == "all":
        return tuple(formats.TYPES.values())
    kind = formats.find(name)
    if kind is None:
        parser.error(f"-d {name}: no such type; there are {', '.join(formats.TYPES)}")
    return (kind,)


def _collective(text: str) -> str:
    """Accepts names of nccl-tests and torch, too: all_reduce_perf, all_to_all, reduce-scatter."""
    bare = text.removesuffix("_perf").replace("_", "").replace("-", "")
    for name in COLLECTIVES:
        if bare == name.replace("_", ""):
            return name
    raise argparse.ArgumentTypeError(f"`{text}` is not one of {', '.join(COLLECTIVES)}")


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if not match or (size := int(match[1]) << _UNITS[match[2].upper()]) > 1 << 40:
        raise argparse.ArgumentTypeError(
            f"invalid size `{text}`: expected at most 1T, for example 4K"
        )
    return size


@dataclass(frozen=True, slots=True)
class _Whole:
    """Reads a whole number within bounds."""

    least: int
    most: int

    def __call__(self, text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else -1
        if not self.least <= number <= self.most:
            raise argparse.ArgumentTypeError(
                f"invalid number `{text}`: expected {self.least} to {self.most}"
            )
        return number


def _average(text: str) -> str:
    if text in AVERAGES:
        return text
    if text in ("0", "1", "2", "3"):
        return AVERAGES[int(text)]
    raise argparse.ArgumentTypeError(f"`{text}` is not one of {', '.join(AVERAGES)}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"invalid seconds `{text}`: expected above 0, up to 86400")
    return seconds

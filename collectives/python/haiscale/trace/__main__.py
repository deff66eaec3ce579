"""``haiscale trace``: figures and pictures of the files that `haiscale.trace.record` wrote."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hfreduce.sizes import size_text

from haiscale.trace import chrome, picture
from haiscale.trace.chrome import TraceError
from haiscale.trace.spans import Kind, causes, exposed_share, of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from haiscale.trace.spans import RankTrace

__all__ = ["add_to", "command"]

USAGE: Final = 2
RANKS_SHOWN: Final = 16
CAUSES_SHOWN: Final = 3
DESCRIPTION: Final = (
    "Print what each rank of a trace waited for, and draw the trace. FOLDER is what was passed to "
    "haiscale.trace.record, with a file of each rank."
)


def command(options: argparse.Namespace) -> int:
    """Runs with parsed options; returns the exit status: 0, or 2 for a folder that is refused."""
    outputs: list[tuple[Path | None, Callable[[list[RankTrace]], str]]] = [
        (options.svg, lambda traces: picture.draw(_chosen(traces, options.ranks))),
        (options.chrome, lambda traces: json.dumps(chrome.merged(traces))),
    ]
    try:
        traces = chrome.read(options.folder)
        for path, content in outputs:
            if path is not None:
                path.write_text(content(traces), encoding="utf-8")
    except (TraceError, OSError) as error:
        sys.stderr.write(f"trace: {error}\n")
        return USAGE
    sys.stdout.write(table(traces))
    return 0


def table(traces: Sequence[RankTrace]) -> str:
    """A line for each rank: its steps, its exposed share, and what it waited for longest."""
    lines = [f"{'rank':>6} {'node':<12} {'step':>10} {'exposed':>8} {'sent':>10}  waits"]
    for trace in traces:
        steps = of_kind(trace.spans, Kind.STEP)
        seconds = sum(span.end - span.start for span in steps) / 1e9 / max(1, len(steps))
        sent = sum(span.bytes for span in of_kind(trace.spans, Kind.SENT))
        waits = [
            f"{name} {nanoseconds / 1e6 / max(1, len(steps)):.2f} ms"
            for name, nanoseconds in [*causes(trace.spans).items()][:CAUSES_SHOWN]
        ]
        lines.append(
            f"{trace.rank:>6} {trace.node:<12} {1e3 * seconds:>7.2f} ms "
            f"{100 * exposed_share(trace.spans):>6.1f} % {size_text(sent):>10}  "
            f"{', '.join(waits) or '-'}"
        )
    lines += [
        f"rank {trace.rank} is incomplete: {trace.dropped} spans above the limit and "
        f"{trace.lost} operations are missing: trace fewer steps"
        for trace in traces
        if trace.dropped or trace.lost
    ]
    return "\n".join([*map(_printable, lines), ""])


def _printable(line: str) -> str:
    """Without control characters, which a name in a file may have."""
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


def _chosen(traces: list[RankTrace], ranks: set[int] | None) -> list[RankTrace]:
    """The ranks to draw; by default the first ones."""
    if ranks is None:
        return traces[:RANKS_SHOWN]
    chosen = [trace for trace in traces if trace.rank in ranks]
    if missing := ranks - {trace.rank for trace in chosen}:
        raise TraceError(f"--ranks: the folder has no file of rank {min(missing)}")
    return chosen


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `trace` to the commands of ``haiscale``."""
    parser = commands.add_parser(
        "trace", help="figures and pictures of traced steps", description=DESCRIPTION
    )
    parser.set_defaults(command=command)
    add: Any = parser.add_argument
    add("folder", type=Path, metavar="FOLDER")
    add("--svg", type=Path, metavar="FILE", help="the steps of the ranks as lanes")
    add("--ranks", type=_ranks, metavar="LIST",
        help=f"ranks in the picture, such as 0,8,16; default: the first {RANKS_SHOWN}")  # fmt: skip
    add("--chrome", type=Path, metavar="FILE",
        help="all ranks in one file for chrome://tracing or Perfetto")  # fmt: skip


def _ranks(text: str) -> set[int]:
    try:
        ranks = {int(part) for part in text.split(",")}
    except ValueError:
        ranks = set()
    if not ranks or min(ranks) < 0:
        raise argparse.ArgumentTypeError(f"invalid ranks {text!r}: expected numbers such as 0,8,16")
    return ranks

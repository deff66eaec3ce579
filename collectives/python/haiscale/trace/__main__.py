"""``haiscale trace``: figures and pictures of the files that `haiscale.trace.record` wrote."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hfreduce.sizes import size_text

from haiscale.trace import chrome, heatmap, picture, traffic
from haiscale.trace.chrome import TraceError
from haiscale.trace.spans import Kind, causes, exposed_share, of_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from haiscale.trace.spans import RankTrace

__all__ = ["add_to", "command"]

USAGE: Final = 2
RANKS_SHOWN: Final = 16
CAUSES_SHOWN: Final = 3
DESCRIPTION: Final = """
Print what each rank of a trace waited for, or the bytes between ranks, and draw the trace. FOLDER
is what was passed to haiscale.trace.record, with a file of each rank.
"""
EXAMPLES: Final = """
examples:
  haiscale trace traces --svg trace.svg
  haiscale trace traces --bytes                    # from each rank to each other rank
  haiscale trace traces --heatmap heatmap.svg      # the same as a picture
  haiscale trace traces -o json

exit status: 0 done, 2 invalid arguments or files
"""


def command(options: argparse.Namespace) -> int:
    """Runs with parsed options; returns the exit status: 0, or 2 for a folder that is refused."""
    outputs: list[tuple[Path | None, Callable[[list[RankTrace]], str]]] = [
        (options.svg, lambda traces: picture.draw(_chosen(traces, options.ranks))),
        (options.heatmap, lambda traces: heat_map(traces, options.ranks)),
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
    if options.output == "json":
        sys.stdout.write(json.dumps(document(traces), indent=1) + "\n")
    elif options.bytes:
        width = shutil.get_terminal_size((100, 24)).columns
        sys.stdout.write(_printable(traffic.table(traffic.by_rank(traces), width)))
    else:
        sys.stdout.write(table(traces))
    return 0


def table(traces: Sequence[RankTrace]) -> str:
    """A line for each rank: its steps, its exposed share, and what it waited for longest."""
    lines = [f"{'rank':>6} {'node':<12} {'step':>10} {'exposed':>8} {'sent':>10}  waits"]
    for figures in map(_figures, traces):
        waits = [
            f"{wait['name']} {1e3 * wait['seconds']:.2f} ms"
            for wait in figures["waits"][:CAUSES_SHOWN]
        ]
        lines.append(
            f"{figures['rank']:>6} {figures['node']:<12} {1e3 * figures['step_seconds']:>7.2f} ms "
            f"{100 * figures['exposed']:>6.1f} % {size_text(figures['sent_bytes']):>10}  "
            f"{', '.join(waits) or '-'}"
        )
    lines += [
        f"rank {trace.rank} is incomplete: {trace.dropped} spans above the limit and "
        f"{trace.lost} operations are missing: trace fewer steps"
        for trace in traces
        if trace.dropped or trace.lost
    ]
    return _printable("\n".join([*lines, ""]))


def document(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """The same for machines, with the bytes between ranks. Times are of one step, in seconds."""
    return {
        "version": 1,
        "world_size": traces[0].world_size,
        "ranks": [_figures(trace) for trace in traces],
        "traffic": traffic.document(traffic.by_rank(traces)),
    }


def heat_map(traces: list[RankTrace], chosen: set[int] | None) -> str:
    """The bytes between ranks, or between nodes if there are many ranks."""
    shown = traffic.by_rank(traces if chosen is None else _chosen(traces, chosen))
    what = "ranks"
    if len(shown.names) > heatmap.PLACES_MAX:
        shown, what = traffic.by_node(shown), "nodes"
    count = len(shown.names)
    if count > heatmap.PLACES_MAX:
        raise TraceError(f"--heatmap: {count} nodes: choose ranks of fewer nodes with --ranks")
    steps = len(of_kind(traces[0].spans, Kind.STEP))
    return heatmap.draw(shown, f"{count} {what} in {steps} steps")


def _figures(trace: RankTrace) -> dict[str, Any]:
    """The figures of one rank."""
    steps = of_kind(trace.spans, Kind.STEP)
    count = max(1, len(steps))
    return {
        "rank": trace.rank,
        "node": trace.node,
        "steps": len(steps),
        "step_seconds": sum(span.end - span.start for span in steps) / 1e9 / count,
        "exposed": exposed_share(trace.spans),
        "sent_bytes": sum(span.bytes for span in of_kind(trace.spans, Kind.SENT)),
        "waits": [
            {"name": name, "seconds": nanoseconds / 1e9 / count}
            for name, nanoseconds in causes(trace.spans).items()
        ],
        "dropped_spans": trace.dropped,
        "lost_operations": trace.lost,
    }


def _printable(text: str) -> str:
    """Without control characters other than line ends, which a name in a file may have."""
    return "\n".join(
        "".join(each if each.isprintable() else "\ufffd" for each in line)
        for line in text.split("\n")
    )


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
        "trace",
        help="figures and pictures of traced steps",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    add: Any = parser.add_argument
    add("folder", type=Path, metavar="FOLDER")
    add("--svg", type=Path, metavar="FILE", help="the steps of the ranks as lanes")
    add("--bytes", action="store_true",
        help="print the bytes from each rank to each other one, or between nodes "
        "if ranks do not fit")  # fmt: skip
    add("--heatmap", type=Path, metavar="FILE", help="the same bytes as a heat map")
    add("--ranks", type=_ranks, metavar="LIST",
        help=f"ranks in the pictures, such as 0,8,16; default: the first {RANKS_SHOWN} lanes, and "
        "all ranks of the heat map")  # fmt: skip
    add("--chrome", type=Path, metavar="FILE",
        help="all ranks in one file for chrome://tracing or Perfetto")  # fmt: skip
    add("-o", "--output", choices=("table", "json"), default="table",
        help="what is printed; json has the bytes between ranks, too")  # fmt: skip


def _ranks(text: str) -> set[int]:
    try:
        ranks = {int(part) for part in text.split(",")}
    except ValueError:
        ranks = set()
    if not ranks or min(ranks) < 0:
        raise argparse.ArgumentTypeError(f"invalid ranks {text!r}: expected numbers such as 0,8,16")
    return ranks

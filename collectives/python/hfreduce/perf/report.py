"""Output of results: a table, JSON, and a trace for Chrome and Perfetto."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Any, TextIO

from hfreduce import _native
from hfreduce.sizes import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hfreduce.perf.measure import Call, Row
    from hfreduce.perf.options import Options

__all__ = ["Table", "document", "trace"]

VERSION = 1
"""Version of the JSON format; incremented when a field is removed or changes its meaning."""

_HEAD = (
    f"#{'size':>11}{'count':>13}{'type':>15}{'redop':>7}{'root':>6}"
    f"{'time':>12}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'limit':>8}"
)
_UNITS = (
    f"#{'(B)':>11}{'(elements)':>13}{'':>15}{'':>7}{'':>6}"
    f"{'(us)':>12}{'(GB/s)':>9}{'(GB/s)':>9}{'':>8}{'(%)':>8}"
)


class Table:
    """Writes rows as they are measured."""

    def __init__(self, options: Options, machines: Sequence[int], out: TextIO) -> None:
        self._options = options
        self._out = out
        self._rows: list[Row] = []
        place = "one machine" if len(set(machines)) == 1 else f"{len(set(machines))} machines"
        ranks = "1 rank" if len(machines) == 1 else f"{len(machines)} ranks"
        simulated = f", as {options.nodes} nodes in {options.zones} zones"
        self._line(
            f"# hfreduce-perf {options.collective.name}: {ranks} on {place}"
            f"{simulated if options.nodes > 1 else ''}; {_native.instruction_set()}; "
            f"{options.warmup} warm-up and {options.iterations} timed operations a row, "
            f"time of {options.average}"
        )
        self._line(_HEAD)
        self._line(_UNITS)

    def row(self, row: Row) -> None:
        """Adds a row."""
        self._rows.append(row)
        shape = row.shape
        op = shape.op if shape.collective.reduces else "none"
        root = str(shape.root) if shape.collective.rooted else "-1"
        wrong = "N/A" if row.wrong < 0 else str(row.wrong)
        self._line(
            f" {row.size_bytes:>11}{shape.count:>13}{shape.kind.name:>15}{op:>7}{root:>6}"
            f"{row.seconds * 1e6:>12.2f}{row.algorithm_bytes_per_second / 1e9:>9.2f}"
            f"{row.bus_bytes_per_second / 1e9:>9.2f}{wrong:>8}{row.of_limit * 100:>8.1f}"
        )

    def end(self) -> None:
        """Summary of all rows."""
        summary = _summary(self._rows)
        checked = "not checked" if summary["wrong"] is None else f"{summary['wrong']} wrong"
        self._line(
            f"# average busbw {summary['average_busbw_gbps']:.2f} GB/s; values {checked}; "
            f"triad {summary['triad_gbps_min']:.1f} to {summary['triad_gbps_max']:.1f} GB/s"
        )

    def _line(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def document(options: Options, machines: Sequence[int], rows: Sequence[Row]) -> dict[str, Any]:
    """The results as JSON; docs/guides/measure-and-check.md lists the fields."""
    return {
        "version": VERSION,
        "collective": options.collective.name,
        "ranks": len(machines),
        "machines": len(set(machines)),
        "nodes": options.nodes,
        "zones": options.zones,
        "iterations": options.iterations,
        "warmup": options.warmup,
        "tensors": options.tensors,
        "average": options.average,
        "instruction_set": _native.instruction_set(),
        "kernel": platform.release(),
        "rows": [_row(row) for row in rows],
        "summary": _summary(rows),
    }


def _row(row: Row) -> dict[str, Any]:
    shape = row.shape
    return {
        "size_bytes": row.size_bytes,
        "count": shape.count,
        "type": shape.kind.name,
        "op": shape.op if shape.collective.reduces else None,
        "root": shape.root if shape.collective.rooted else None,
        "time_us": row.seconds * 1e6,
        "time_us_max": row.slowest_seconds * 1e6,
        "time_us_min": row.fastest_seconds * 1e6,
        "algbw_gbps": row.algorithm_bytes_per_second / 1e9,
        "busbw_gbps": row.bus_bytes_per_second / 1e9,
        "wrong": None if row.wrong < 0 else row.wrong,
        "triad_gbps": row.triad_bytes_per_second / 1e9,
        "of_limit": row.of_limit,
    }


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    triads = [row.triad_bytes_per_second / 1e9 for row in rows]
    wrong = sum(row.wrong for row in rows) if all(row.wrong >= 0 for row in rows) else None
    return {
        "average_busbw_gbps": sum(row.bus_bytes_per_second for row in rows) / len(rows) / 1e9,
        "wrong": wrong,
        "triad_gbps_min": min(triads),
        "triad_gbps_max": max(triads),
    }


def trace(path: Path, calls: Sequence[Call], names: Sequence[str]) -> None:
    """Trace Event Format: one process per machine, one thread per rank, times in microseconds."""
    origin = min((call.start_seconds for call in calls), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        for number, name in enumerate(names)
    ]
    threads = sorted({(call.machine, call.rank) for call in calls})
    events += [
        {"ph": "M", "name": "thread_name", "pid": m, "tid": r, "args": {"name": f"rank {r}"}}
        for m, r in threads
    ]
    events += [
        {
            "ph": "X",
            "name": f"{call.shape.collective.name} {size_text(call.size_bytes)}",
            "cat": call.shape.kind.name,
            "pid": call.machine,
            "tid": call.rank,
            "ts": (call.start_seconds - origin) * 1e6,
            "dur": call.seconds * 1e6,
            "args": {"op": call.shape.op, "bytes": call.size_bytes, "number": call.number},
        }
        for call in calls
    ]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document), encoding="utf-8")

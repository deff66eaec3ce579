"""Export of the recorders for Prometheus and Chrome's trace viewer; pure functions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hfreduce.status import BAD, HERE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hfreduce.flight import Recorder
    from hfreduce.status import Group

__all__ = ["prometheus", "trace"]

_VERDICTS = (*BAD, "moving", "idle")
_LIVES = ("running", "stopped", "dead", "silent", "unknown")


def prometheus(groups: Sequence[Group], recorders: Iterable[Recorder]) -> str:
    """Text exposition format, for a textfile collector; seconds, and counts since a rank's start.

    Ranks are named by the group's number: names of jobs are in `hfreduce status`, and none of the
    series outlives what it is about.
    """
    ranks = [(group, rank) for group in groups for rank in group.ranks if rank.seen == HERE]
    own = {(group.group, rank.rank) for group, rank in ranks}
    called = [
        (_labels(group=each.data["group"], rank=each.data["rank"]), each.data["operations"])
        for each in recorders
        if (each.data["group"], each.data["rank"]) in own
    ]
    lives = [rank.life for _, rank in ranks]
    verdicts = [group.verdict for group in groups]
    families = [
        (
            "groups", "gauge", "Groups with ranks on this machine, by verdict of hfreduce status.",
            [(_labels(verdict=word), verdicts.count(word)) for word in _VERDICTS],
        ),
        (
            "ranks", "gauge", "Ranks on this machine, by the state of their processes.",
            [(_labels(life=word), lives.count(word)) for word in _LIVES],
        ),
        ("operations_total", "counter", "Operations that a rank has called.", called),
        (
            "operation_seconds", "gauge", "For how long a rank is in its operation; 0: in none.",
            [
                (_labels(group=g.group, rank=r.rank), r.since_seconds if r.operation else 0.0)
                for g, r in ranks
            ],
        ),
        (
            "silence_seconds", "gauge", "Since a rank's last sign of life; ten come a second.",
            [(_labels(group=g.group, rank=r.rank), r.heard_seconds or 0.0) for g, r in ranks],
        ),
        (
            "culprit", "gauge", "1: the verdict of a group blames this rank.",
            [(_labels(group=g.group, rank=rank), 1) for g in groups for rank in g.culprits],
        ),
    ]  # fmt: skip
    lines = []
    for name, kind, description, samples in families:
        lines += [f"# HELP hfreduce_{name} {description}", f"# TYPE hfreduce_{name} {kind}"]
        lines += [f"hfreduce_{name}{labels} {value:g}" for labels, value in samples]
    return "\n".join(lines)


def _labels(**labels: object) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def trace(groups: Sequence[Group], recorders: Iterable[Recorder]) -> str:
    """Trace Event Format: a process a group, a thread a rank, times on this machine's clock."""
    numbers = {group.group: number for number, group in enumerate(groups)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": numbers[group.group],
         "args": {"name": f"{group.job or 'job without a name'}, group {group.group}"}}
        for group in groups
    ]  # fmt: skip
    for each in recorders:
        if each.data["group"] in numbers:
            events += _of_rank(each.data, numbers[each.data["group"]])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _of_rank(data: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    place = {"pid": number, "tid": data["rank"]}
    name = f"rank {data['rank']} ({data['node']})"
    yield {"ph": "M", "name": "thread_name", "args": {"name": name}} | place
    for entry in data["entries"]:
        # One that is under way lasts until it was looked at.
        end = data["read_ns"] if entry["state"] == "started" else entry["finished_ns"]
        yield place | {
            "ph": "X",
            "name": entry["operation"],
            "cat": entry["kind"],
            "ts": entry["called_ns"] / 1e3,
            "dur": max(end - entry["called_ns"], 0) / 1e3,
            "args": {
                "number": entry["sequence"],
                "state": entry["state"],
                "chunks": f"{entry['chunks_delivered']} of {entry['chunks']}",
            },
        }

"""Figures of many machines that this one plays: a slow network, and ranks that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.collectives import failures, netns
from bench.collectives.fault_ranks import RANKS
from bench.collectives.rows import Row, absent, row

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PARTS"]

FAULT_ROUNDS, SEED = 12, 1


def network(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Eight namespaces in two zones, one link between; Gloo in the same rounds."""
    what = "8 namespaces at 1 Gb/s"
    if why := netns.missing():
        return [absent(f"{what}: of 2S/B", why, 0.9, more=True)], {}
    options = netns.parsed(["--rounds", str(rounds), *(["--mib", "1"] if quick else [])])
    told = netns.measured(options)
    size_bytes = options.mib * netns.MIB
    limit = 2 * size_bytes / (options.megabits * 1e6 / 8)
    rows = []
    for name in netns.BACKENDS:
        shares = [limit / seconds for seconds in told[name]["seconds"]]
        goal = 0.9 if name == "hfreduce" else None
        rows.append(row(f"{what}, {name}: of 2S/B", "of limit", shares, goal, more=True))
        # The way that is further from S, in hundredths of S.
        off = [
            max(abs(way / size_bytes - 1) for way in both) * 100
            for both in told[name]["crossed_bytes"]
        ]
        within = 1.0 if name == "hfreduce" else None
        rows.append(row(f"{what}, {name}: link off S", "%", off, within))
    return rows, told


def faults(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """One of 32 ranks is killed, stopped, cut off or unplugged: who says so, and how soon."""
    only = ["killed"] if quick else list(failures.FAULTS)
    entries = failures.measure(1 if quick else FAULT_ROUNDS, SEED, only)
    rows = []
    for entry in entries:
        what = f"{entry['fault']}, {entry['layout']}"
        for key, where, goal in (
            ("ms", "", failures.GOAL_MS),
            ("same_machine_ms", ", own", failures.LOCAL_KILL_GOAL_MS),
        ):
            told = entry[key]
            if told is None or (where and entry["fault"] != "killed"):
                continue
            rows.append(
                Row(f"{what}{where}: p99 (p50 …)", "ms", told["p99"], told["p50"],
                    told["max"], entry["rounds"], goal, more=False)
            )  # fmt: skip
        wrong = entry["wrong"] + entry["silent"]
        rows.append(row(f"{what}: unnamed or silent", "", [wrong], 0.0))
    return rows, {"ranks": RANKS, "results": entries}


PARTS: dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]] = {
    "network": network, "faults": faults,
}  # fmt: skip

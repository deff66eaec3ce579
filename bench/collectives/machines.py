"""Benchmarks on simulated machines: a slow network, and ranks that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.collectives import failures, netns
from bench.collectives.fault_ranks import LIVENESS_SECONDS, RANKS
from bench.netns import missing
from bench.rows import Row, absent, row

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PARTS"]

FAULT_ROUNDS, SEED = 12, 1


def network(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """Eight namespaces in two zones with one link between them; Gloo in the same rounds."""
    subject = "8 namespaces at 1 Gb/s"
    if why := missing():
        return [absent(f"{subject}: of 2S/B", why, 0.9, more=True)], {}
    rows: list[Row] = []
    details = {}
    for chunk in (0, netns.TUNED_CHUNK_BYTES):
        trial = netns.Trial(rounds, chunk, netns.MIB if quick else 16 * netns.MIB)
        measured = netns.measured(trial)
        details["default" if chunk == 0 else f"chunk_bytes={chunk}"] = measured
        for name in netns.BACKENDS:
            is_hfreduce = name == "hfreduce"
            title = f"{name}, {chunk >> 10} KiB chunks" if is_hfreduce and chunk else name
            rows += network_rows(f"{subject}, {title}", trial, measured[name], goals=is_hfreduce)
    return rows, details


def network_rows(
    title: str, trial: netns.Trial, measured: dict[str, Any], *, goals: bool
) -> list[Row]:
    """One backend: its share of the network's limit, and the bytes between the zones."""
    shares = [trial.limit_seconds / seconds for seconds in measured["seconds"]]
    # The direction that is further from S, in hundredths of S.
    off = [
        max(abs(way / trial.size_bytes - 1) for way in both) * 100
        for both in measured["crossed_bytes"]
    ]
    return [
        row(f"{title}: of 2S/B", "of limit", shares, 0.9 if goals else None, more=True),
        row(f"{title}: link off S", "%", off, 1.0 if goals else None),
    ]


def faults(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:  # noqa: ARG001
    """One of 32 ranks is killed, stopped, cut off or unplugged: time until survivors report it.

    The liveness time-out, which the rows name, is shorter than the default of 10 s.
    """
    only = ["killed"] if quick else list(failures.FAULTS)
    entries = failures.measure(1 if quick else FAULT_ROUNDS, SEED, only)
    rows = [item for entry in entries for item in fault_rows(entry)]
    return rows, {"ranks": RANKS, "liveness_seconds": LIVENESS_SECONDS, "results": entries}


def fault_rows(entry: dict[str, Any]) -> list[Row]:
    """One kind of fault in one layout."""
    rows = []
    title = f"{entry['fault']}, {entry['layout']}, {LIVENESS_SECONDS} s"
    for key, where, goal in (
        ("ms", "", failures.GOAL_MS),
        ("same_machine_ms", ", own", failures.LOCAL_KILL_GOAL_MS),
    ):
        latency = entry[key]
        if latency is None or (where and entry["fault"] != "killed"):
            continue
        rows.append(
            Row(f"{title}{where}: p99 (p50 …)", "ms", latency["p99"], latency["p50"],
                latency["max"], entry["rounds"], goal, more=False)
        )  # fmt: skip
    wrong = entry["wrong"] + entry["silent"]
    rows.append(row(f"{title}: unnamed or silent", "", [wrong], 0.0))
    # A group that fails without a fault counts like one that misses a fault.
    rows.append(row(f"{title}: failed before the fault", "", [entry["failed_before"]], 0.0))
    return rows


PARTS: dict[str, Callable[..., tuple[list[Row], dict[str, Any]]]] = {
    "network": network, "faults": faults,
}  # fmt: skip

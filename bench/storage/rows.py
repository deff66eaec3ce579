"""Ratios and goals of the storage benchmark, its table and its document. Pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from threefs.cli.output import describe_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GOALS_MAX", "GOALS_MIN", "PEERS", "reached", "shown", "summary", "table"]

PEERS: Final = ("GlusterFS", "MooseFS")
MOUNTS: Final = ("mount", "mount, write-back")

FIO_1, FIO_3, FIO_READ = "fio write, 1 writer", "fio write, 3 writers", "fio read, 1 reader"
WRITE, CACHED, COLD = "3FS write, 3 replicas", "3FS read, cached", "3FS read, cold"
RANDOM_WRITES: Final = "4 KiB random writes/s, 16 threads"
LIMIT: Final = f"disk, 3 flushed writes each, no messages: {RANDOM_WRITES}"
TCP, IPERF3 = "3FS read over TCP, cached", "iperf3 over loopback"

GOALS_MIN: Final[Mapping[str, float]] = {
    **{f"{name} / MooseFS: write": 3.0 for name in MOUNTS},
    f"{TCP} / iperf3": 0.75,
    f"{CACHED} / iperf3": 1.5,
    "client: stats/s, 16 threads": 80_000,
    **{f"{name}: stats/s, 8 threads": 80_000 for name in MOUNTS},
    **{f"{name}: creates with 4 KiB and fsync/s, 8 threads": 3_000 for name in MOUNTS},
}
"""Figures and ratios that should be at least this."""
GOALS_MAX: Final[Mapping[str, float]] = {
    "idle, before the first round: 3FS: resident": 300e6,
    "idle, before the first round: 3FS: processor": 0.02,
}
"""Figures that should be at most this."""


def reached(name: str, value: float) -> bool | None:
    """Whether a figure or ratio reaches its goal; None without a goal."""
    if name in GOALS_MIN:
        return value >= GOALS_MIN[name]
    if name in GOALS_MAX:
        return value <= GOALS_MAX[name]
    return None


def ratios_of(rounds: Mapping[str, list[float]]) -> dict[str, float]:
    """Ratios to a limit of the machine and to the peers, of the medians of one run."""
    median = {name: statistics.median(values) for name, values in rounds.items()}
    pairs = {
        "write / fio 1 writer": (WRITE, FIO_1),
        "cached read / fio read": (CACHED, FIO_READ),
        "cold read / fio read": (COLD, FIO_READ),
        f"{TCP} / iperf3": (TCP, IPERF3),
        f"{CACHED} / iperf3": (CACHED, IPERF3),
        **{f"{name}: read / fio read": (f"{name}: read", FIO_READ) for name in MOUNTS},
        **{
            f"{name} / disk: {RANDOM_WRITES}": (f"{name}: {RANDOM_WRITES}", LIMIT)
            for name in MOUNTS
        },
    }
    thirds = {"write / (fio 3 writers / 3)": WRITE}
    thirds |= {f"{name}: write / (fio 3 writers / 3)": f"{name}: write" for name in MOUNTS}
    for peer in PEERS:
        for name in (name for name in median if name.startswith(f"{peer}: ")):
            work = name.removeprefix(f"{peer}: ")
            pairs |= {f"{place} / {peer}: {work}": (f"{place}: {work}", name) for place in MOUNTS}
    ratios = {
        name: median[own] / (median[FIO_3] / 3)
        for name, own in thirds.items()
        if own in median and FIO_3 in median
    }
    return ratios | {
        name: median[own] / median[other]
        for name, (own, other) in pairs.items()
        if own in median and other in median
    }


def summary(
    rounds: Mapping[str, list[float]],
    idle: Mapping[str, float],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """Medians, ratios, and whether each goal was reached. `missing`: reasons of absent figures."""
    median = {name: statistics.median(values) for name, values in rounds.items()}
    ratios = ratios_of(rounds)
    figures = {**median, **ratios, **idle}
    goals = {name: reached(name, figures[name]) for name in figures}
    return {
        "per_second": median,
        "rounds": dict(rounds),
        "ratios": ratios,
        "idle": dict(idle),
        "goals": {name: met for name, met in goals.items() if met is not None},
        "not_measured": dict(missing),
    }


def shown(name: str, value: float) -> str:
    """A figure with its unit."""
    if name.endswith(": processor"):
        return f"{value:.1%}"
    if name.endswith(": resident"):
        return describe_bytes(value)
    if "/s" in name:
        return f"{value:,.0f}/s"
    return f"{describe_bytes(value)}/s"


def table(result: Mapping[str, Any]) -> list[str]:
    """The lines of a table of a summary."""
    lines = [_line("measurement", "median", "spread", "goal")]
    for name, rate in result["per_second"].items():
        values = result["rounds"][name]
        spread = (max(values) - min(values)) / rate if rate else 0.0
        lines.append(_line(name, shown(name, rate), f"{spread:.0%}", _goal(name, rate)))
    for name, value in result["idle"].items():
        lines.append(_line(name, shown(name, value), "", _goal(name, value)))
    for name, ratio in result["ratios"].items():
        lines.append(_line(name, f"{ratio:.2f}", "", _goal(name, ratio)))
    lines += [f"not measured: {name}: {why}" for name, why in result["not_measured"].items()]
    return lines


def _goal(name: str, value: float) -> str:
    met = reached(name, value)
    if met is None:
        return ""
    if name in GOALS_MIN:
        bound = f"≥ {GOALS_MIN[name]:,g}"
    else:
        goal = GOALS_MAX[name]
        bound = f"≤ {shown(name, goal)}"
    return f"{bound} {'yes' if met else 'NO'}"


def _line(name: str, value: str, spread: str, goal: str) -> str:
    return f"{name:<74} {value:>12} {spread:>7} {goal:>18}".rstrip()

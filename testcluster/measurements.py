"""Measurements of end-to-end scenarios: `build/e2e/SCENARIO.json` and a summary of the run.

A measurement above its goal does not fail the test: timings depend on the machine's load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["record", "table"]

FOLDER = Path(__file__).resolve().parents[1] / "build" / "e2e"


@dataclass(frozen=True, slots=True)
class _Measurement:
    scenario: str
    name: str
    value: float
    most: float | None


_recorded: list[_Measurement] = []


def record(scenario: str, name: str, value: float, *, most: float | None = None) -> None:
    """Records a measurement; `name` ends with its unit, `most` is the goal."""
    _recorded.append(_Measurement(scenario, name, value, most))
    path = FOLDER / f"{scenario}.json"
    previous = json.loads(path.read_text()) if path.exists() else {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(previous | {name: round(value, 3)}, indent=1) + "\n")


def table() -> list[str]:
    """The measurements of this run, one per line."""
    lines = []
    for item in _recorded:
        goal = "" if item.most is None else f"≤ {item.most:g}"
        verdict = "missed" if item.most is not None and item.value > item.most else ""
        lines.append(
            f"{item.scenario:<14} {item.name:<36} {item.value:>9.3f} {goal:>8} {verdict}".rstrip()
        )
    return lines

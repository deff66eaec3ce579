"""What the stories measured: `build/e2e/STORY.json`, and a table at the end beside the goals.

A figure above its goal fails no test: a busy machine would decide it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["figure", "table"]

FOLDER = Path(__file__).resolve().parents[1] / "build" / "e2e"


@dataclass(frozen=True, slots=True)
class _Figure:
    story: str
    name: str
    value: float
    most: float | None


_told: list[_Figure] = []


def figure(story: str, name: str, value: float, *, most: float | None = None) -> None:
    """Adds one to a story's figures; the unit is the name's last word. `most` is the goal."""
    _told.append(_Figure(story, name, value, most))
    path = FOLDER / f"{story}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | {name: round(value, 3)}, indent=1) + "\n")


def table() -> list[str]:
    """All of this run, a line each."""
    lines = []
    for one in _told:
        goal = "" if one.most is None else f"≤ {one.most:g}"
        missed = "missed" if one.most is not None and one.value > one.most else ""
        lines.append(
            f"{one.story:<14} {one.name:<36} {one.value:>9.3f} {goal:>8} {missed}".rstrip()
        )
    return lines

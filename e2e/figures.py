"""What the stories measured, for people: `build/e2e/NAME.json`."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["figure"]

FOLDER = Path(__file__).resolve().parents[1] / "build" / "e2e"


def figure(story: str, name: str, seconds: float) -> None:
    """Adds one to a story's figures."""
    path = FOLDER / f"{story}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | {name: round(seconds, 3)}, indent=1) + "\n")

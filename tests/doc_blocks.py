"""The code blocks of the pages, with the marker that says how each is checked.

A marker is a comment on the line before a block: `<!-- test: HOW -->`.

| HOW | the block |
|---|---|
| `file NAME` | is saved as NAME for the blocks that use it, on any page |
| `render` | holds Helm commands; they are rendered with the chart of this repository |
| `manifest` | holds objects; the models and a real API server take them |
| `run [STATUS …]` | holds commands of our programs, which are run and end with 0 or one of these |
| `compile` | is Python that compiles; names that stand for the reader's own may be undefined |
| `diff` | shows a change |
| `cluster` | is run on an installed cluster by `e2e/tests/test_docs.py` |
| `skip WHY` | cannot run in a test, and why |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for folder in ("tutorial", "guides", "operations")
    for path in (ROOT / "docs" / folder).rglob("*.md")
    # Tested beside the code that it is about.
    if path.name != "storage.md"
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- test: (\w+) ?(.*?) -->\n\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    how: str
    """The marker's first word; empty where there is none."""
    detail: str
    text: str

    @property
    def where(self) -> str:
        """For people: page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*hows: str) -> list[Block]:
    """All blocks of the pages, or those that are checked in one of these ways."""
    found = [block for page in PAGES for block in _of(page)]
    return [block for block in found if not hows or block.how in hows]


def _of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        marker = MARKER.search(text[: match.start()])
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start()) + 1,
                match[1],
                marker[1] if marker else "",
                marker[2] if marker else "",
                match[2],
            )
        )
    return found

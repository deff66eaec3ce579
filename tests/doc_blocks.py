"""The code blocks of the pages, with the marker that selects their check.

A marker is a comment on the line before a block: `<!-- test: HOW -->`. Outside the tutorial, the
guides and operations, blocks in no language, `text` or `mermaid` are pictures and need none.

| HOW | the block |
|---|---|
| `file NAME` | is saved as NAME for the blocks that use it, on any page |
| `render` | holds Helm commands; they are rendered with the chart of this repository |
| `manifest` | holds objects; the models and a real API server take them |
| `run [STATUS …]` | holds commands of our programs, which are run and end with 0 or one of these |
| `compile` | is Python that compiles; names that stand for the reader's own may be undefined |
| `names` | is Python about our own modules; what it imports and calls exists |
| `json` | is one JSON value |
| `local` | is a cluster file for one machine; `flyer` takes it |
| `make` | holds targets of the Makefile |
| `options FILE` | holds commands whose options that program defines |
| `diff` | shows a change |
| `dry` | is sent to a real API server as a dry run |
| `cluster` | is run on an installed cluster by `e2e/tests/administration/test_docs.py` |
| `end` | likewise, after all others |
| `session` | is commands after `$ ` and their output, compared in the same file |
| `elsewhere FILE …` | is run as it is, or command by command, by these tests |
| `skip WHY` | cannot run in a test, and why |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "blocks"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOR_READERS = ("tutorial", "guides", "operations")
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
    def picture(self) -> bool:
        """Whether it shows something, rather than being there to be typed."""
        is_output = self.language in ("", "text", "mermaid")
        return is_output and self.page.parent.name not in (*FOR_READERS, "runbooks")

    @property
    def where(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*hows: str) -> list[Block]:
    """All blocks of the pages, or those that are checked in one of these ways."""
    result = [block for page in PAGES for block in _of(page)]
    return [block for block in result if not hows or block.how in hows]


def _of(page: Path) -> list[Block]:
    text = page.read_text()
    result = []
    for match in FENCE.finditer(text):
        marker = MARKER.search(text[: match.start()])
        result.append(
            Block(
                page,
                text.count("\n", 0, match.start()) + 1,
                match[1],
                marker[1] if marker else "",
                marker[2] if marker else "",
                match[2],
            )
        )
    return result

"""Output of `flyer`: results on stdout, messages on stderr, colours on terminals only.

Tables may change between versions; `-o json` is stable.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flyer.errors import FlyerError

__all__ = [
    "Output", "age", "clock", "colours", "paint", "print_error", "print_result", "say", "table",
]  # fmt: skip


class Output(StrEnum):
    """The choices of -o."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


STATE_COLOURS = {
    "Running": "32",
    "Succeeded": "36",
    "Failed": "31",
    "Lost": "31",
    "Queued": "33",
    "Draining": "33",
    "Reserved": "33",
    "Starting": "33",
    "Suspending": "33",
    "Suspended": "35",
    "Busy": "32",
}


def colours(stream: TextIO) -> bool:
    """Whether a stream shows colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str, stream: TextIO) -> str:
    """The text in a colour, if the stream shows colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if code and colours(stream) else text


def say(text: str) -> None:
    """Print a message to stderr: stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def print_error(error: FlyerError, output: Output = Output.TABLE) -> None:
    """Print an error and its hint."""
    if output is Output.JSON:
        import json

        from flyer.errors import error_to_json

        print(json.dumps({"error": error_to_json(error)}), file=sys.stderr)
        return
    head = paint("error:", "31;1", sys.stderr)
    print(f"{head} {error.message}", file=sys.stderr)
    if error.hint:
        print(f"{paint('hint:', '36', sys.stderr)} {error.hint}", file=sys.stderr)


def print_result(value: Any, output: Output) -> None:
    """A result in JSON or YAML."""
    from flyer.views import to_json

    document = to_json(value)
    if output is Output.YAML:
        from ruamel.yaml import YAML

        writer = YAML(typ="safe", pure=True)
        writer.default_flow_style = False
        writer.dump(document, sys.stdout)
    else:
        import json

        print(json.dumps(document, indent=2))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; a cell that names a state has its colour."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(name), *(len(row[index]) for row in cells)) if cells else len(name)
        for index, name in enumerate(header)
    ]
    lines = ["  ".join(name.ljust(width) for name, width in zip(header, widths, strict=True))]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(
            "  ".join(
                paint(text, STATE_COLOURS.get(cell, ""), sys.stdout)
                for text, cell in zip(padded, row, strict=True)
            )
        )
    return "\n".join(line.rstrip() for line in lines)


def age(seconds: float) -> str:
    """`45s`, `3m12s`, `2h05m`, `4d03h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def clock(moment: float) -> str:
    """Local time of day, with the date unless it is today."""
    from datetime import datetime

    when = datetime.fromtimestamp(moment).astimezone()
    today = datetime.now().astimezone().date()
    return when.strftime("%H:%M:%S" if when.date() == today else "%Y-%m-%d %H:%M:%S")

"""Shared parts of all commands: consoles and units."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Output",
    "bytes_of",
    "describe_bytes",
    "print_json",
    "printable",
    "stderr_console",
    "stdout_console",
]

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Output(StrEnum):
    """Output format of a result."""

    TABLE = "table"
    JSON = "json"


def stdout_console() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console(highlight=False)


def stderr_console() -> Console:
    """The console for progress and notes; without colors and bars if it is not a terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def describe_bytes(count: float) -> str:
    """Format a size for display: 1023 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def printable(name: str) -> str:
    """The name with characters escaped that could move the cursor or reorder a line."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in name
    )


def bytes_of(text: str) -> int:
    """Parse a size such as 4096, 64K or 1G (powers of 1024; an i, B or iB may follow)."""
    trimmed = text.strip().upper().removesuffix("B").removesuffix("I")
    factor = UNITS.get(trimmed[-1:], 1)
    digits = trimmed[:-1] if factor > 1 else trimmed
    try:
        return int(float(digits) * factor)
    except ValueError:
        raise InvalidArgument(
            f"invalid size `{text}`: expected for example 4096, 64K, 32M or 1G"
        ) from None

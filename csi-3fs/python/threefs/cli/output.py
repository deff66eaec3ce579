"""Shared parts of all commands: consoles, units, errors as exit statuses."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from threefs.errors import InvalidArgument, NotFound, ThreeFSError, Unavailable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "Output",
    "bytes_of",
    "describe_bytes",
    "print_json",
    "report_error",
    "stderr_console",
    "stdout_console",
]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 102
EXIT_TIMEOUT = 106
EXIT_UNREACHABLE = 107
EXIT_INTERRUPTED = 130

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
    """The console for progress and notes; without colours and bars if it is not a terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def report_error(error: ThreeFSError | OSError) -> int:
    """Print the error; return its exit status."""
    sys.stderr.write(f"threefs: error: {error}\n")
    return _status(error)


def _status(error: ThreeFSError | OSError) -> int:
    if isinstance(error, InvalidArgument):
        return EXIT_USAGE
    if isinstance(error, NotFound | FileNotFoundError):
        return EXIT_NOT_FOUND
    if isinstance(error, Unavailable):
        unreached = error.who is not None and error.who.startswith("mgmtd")
        return EXIT_UNREACHABLE if unreached else EXIT_TIMEOUT
    return EXIT_FAILED


def describe_bytes(count: float) -> str:
    """Format a size for display: 1023 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def bytes_of(text: str) -> int:
    """A size as people write it: 4096, 64K, 1G (powers of 1024; an i, B or iB may follow)."""
    trimmed = text.strip().upper().removesuffix("B").removesuffix("I")
    factor = UNITS.get(trimmed[-1:], 1)
    digits = trimmed[:-1] if factor > 1 else trimmed
    try:
        return int(float(digits) * factor)
    except ValueError:
        raise InvalidArgument(f"size `{text}` is not like 4096, 64K, 32M or 1G") from None

"""Errors of the test cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ClusterError", "tail"]


class ClusterError(Exception):
    """A cluster or a named part of it could not be built, started or stopped."""


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log file, indented, for an error's text."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        return f"  (no log: {error})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])

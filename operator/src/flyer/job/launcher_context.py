"""Launcher context: the destination of its ranks' output and of its reports.

The default keeps one file per rank and reports nothing: on one machine the driver
observes its pods itself. `flyer.job.container` has the other implementation.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flyer.job.failure import last_traceback

if TYPE_CHECKING:
    from pathlib import Path

    from flyer.job.failure import Failure

__all__ = ["LauncherContext"]


class LauncherContext:
    """Output in files; no reports."""

    def output_for(self, rank: int) -> int | None:  # noqa: ARG002
        """A descriptor for the rank's output, closed here after the fork; None: a file."""
        return None

    def events(self) -> dict[int, int]:
        """Descriptors to poll, and for what."""
        return {}

    def due(self) -> float | None:
        """When to be called at the latest, in `time.monotonic()`."""
        return None

    def take(self, ready: dict[int, int]) -> list[int]:  # noqa: ARG002
        """Do what the ready descriptors ask for; signals to pass on to the ranks."""
        return []

    def started(self) -> None:
        """All ranks are forked."""

    def traceback(self, rank: int, log_path: Path, offset: int) -> str | None:  # noqa: ARG002
        """The last traceback that a rank printed."""
        return last_traceback(log_path, offset)

    def blame(self, text: str) -> None:
        """The last thing that a user sees: which rank failed first, and its own words."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def ended(self, code: int, failure: Failure | None) -> None:
        """The ranks are gone; the launcher ends with this status next."""

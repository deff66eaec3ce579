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
    """Writes output to files; reports nothing."""

    def output_for(self, rank: int) -> int | None:  # noqa: ARG002
        """A descriptor for the rank's output, closed after the fork; None: a file."""
        return None

    def events(self) -> dict[int, int]:
        """The descriptors to poll, with their events."""
        return {}

    def due(self) -> float | None:
        """Deadline of the next call, in `time.monotonic()`."""
        return None

    def take(self, ready: dict[int, int]) -> list[int]:  # noqa: ARG002
        """Handle the ready descriptors. Returns the signals for the ranks."""
        return []

    def started(self) -> None:
        """Called once all ranks are forked."""

    def traceback(self, rank: int, log_path: Path, offset: int) -> str | None:  # noqa: ARG002
        """The last traceback that a rank printed."""
        return last_traceback(log_path, offset)

    def blame(self, text: str) -> None:
        """Show the final message: the first failing rank and its traceback."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def ended(self, code: int, failure: Failure | None) -> None:
        """Called after the last rank ended, with the launcher's exit status."""

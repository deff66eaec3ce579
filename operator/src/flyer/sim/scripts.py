"""Behaviour of a simulated job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Behavior(StrEnum):
    """Reaction of the job to a suspension."""

    COOPERATIVE = "cooperative"  # acknowledges, saves, releases
    EXITS = "exits"  # acknowledges, saves, exits with status 0
    CRASHES = "crashes"  # acknowledges, then exits with status 1 without having saved
    SILENT = "silent"  # never answers and continues


@dataclass(frozen=True, slots=True)
class Script:
    """One job's run: steps, checkpoints and an end. Times in seconds."""

    steps: int = 100
    step_seconds: float = 1.0
    checkpoint_steps: int = 10
    save_seconds: float = 0.5
    # Interval of progress reports while it saves for a suspension; they extend the grace period.
    save_report_seconds: float = 1.0
    start_seconds: float = 0.5
    behavior: Behavior = Behavior.COOPERATIVE
    fails_at_step: int | None = None
    hangs_at_step: int | None = None
    # Hangs and failures of the first attempt only; restarts succeed.
    once: bool = True


__all__ = ["Behavior", "Script"]

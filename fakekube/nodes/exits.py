"""Ends of simulated containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["KILLED", "TERMINATED", "Exit"]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a pod's main container ended."""

    status: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""

    @property
    def accounted(self) -> bool:
        """Whether the launcher survived its ranks to report it."""
        return self.signal != 9 and self.reason in ("", "Completed", "Error")


KILLED: Final = Exit(137, 9)
TERMINATED: Final = Exit(143, 15, "Error")

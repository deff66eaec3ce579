"""The nine priorities, with the order and the numbers of HAI."""

from __future__ import annotations

from enum import StrEnum


class Priority(StrEnum):
    """Values of `spec.priority`."""

    EXTREME_HIGH = "extreme-high"
    VERY_HIGH = "very-high"
    HIGH = "high"
    ABOVE_NORMAL = "above-normal"
    NORMAL = "normal"
    UNDER_NORMAL = "under-normal"
    BELOW_NORMAL = "below-normal"
    LOW = "low"
    AUTO = "auto"

    @property
    def level(self) -> int:
        """Higher levels start first. `auto` has no fixed one: see `flyer.engine.priority_level`."""
        return _LEVELS[self]


_LEVELS = {
    Priority.EXTREME_HIGH: 50,
    Priority.VERY_HIGH: 40,
    Priority.HIGH: 30,
    Priority.ABOVE_NORMAL: 20,
    Priority.NORMAL: 10,
    Priority.UNDER_NORMAL: 8,
    Priority.BELOW_NORMAL: 5,
    Priority.LOW: 0,
    Priority.AUTO: -1,
}

__all__ = ["Priority"]

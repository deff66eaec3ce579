"""Durations as text."""

from __future__ import annotations

import re

from threefs.errors import InvalidArgument

__all__ = ["seconds_of"]

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
DAYS_MAX = 366


def seconds_of(name: str, text: str) -> int:
    """A duration such as 90s, 30m, 1h or 7d, in seconds; `name` is what it was given as."""
    match = re.fullmatch(r"([1-9]\d{0,8})([smhd])", text, re.ASCII)
    seconds = int(match[1]) * SECONDS[match[2]] if match else 0
    if not 0 < seconds <= DAYS_MAX * SECONDS["d"]:
        raise InvalidArgument(
            f"{name} is `{text[:80]}`; it must be a number and s, m, h or d, at most {DAYS_MAX}d, "
            "for example 1h"
        )
    return seconds

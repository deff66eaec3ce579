"""A machine as the scheduler sees it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """What a driver observed of one node.

    `ready` means that new work may go there. A node that stops being ready keeps the gang that
    runs on it (somebody cordoned it); a node whose gang is gone is a `NodeLost`.
    """

    name: str
    zone: str
    leaf: str = ""
    node_class: str = "default"
    slots: int = 1
    ready: bool = True
    reason: str = ""


@functools.lru_cache(maxsize=65_536)
def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts a10 after a9."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    )


__all__ = ["Node", "natural_order"]

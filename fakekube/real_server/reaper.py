"""Reaper: kills the client of each distinct write once, after the write and before its response.

The key of a write identifies its effect. A successor that repeats the write, because it cannot know
that it was performed, is not killed. So a scenario with n distinct writes has n kills, and ends.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fakekube.apiserver.faults import Call

__all__ = ["Key", "Reaper"]

Key = tuple[str, ...]


@dataclass(slots=True)
class Reaper:
    """Kills agents whose names start with `agent`; `kill` returns when that process is dead.

    `key_of` takes the call and its body; None: this write does not kill.
    """

    agent: str
    key_of: Callable[[Call, bytes], Key | None]
    kill: Callable[[str], Coroutine[None, None, None]]
    deaths: dict[Key, str] = field(default_factory=dict)  # agents, in order
    seen: dict[Key, int] = field(default_factory=dict)  # performed writes
    _turns: dict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock), repr=False
    )

    def key(self, call: Call, body: bytes) -> Key | None:
        """The key of a call that may kill its client."""
        if not call.writes or not call.agent.startswith(self.agent):
            return None
        return self.key_of(call, body)

    def turn(self, agent: str) -> asyncio.Lock:
        """Serializes an agent's writes: one kill must not follow several performed writes."""
        return self._turns[agent]

    def dies(self, call: Call, key: Key) -> bool:
        """The write was performed. Returns whether its client is to be killed."""
        self.seen[key] = self.seen.get(key, 0) + 1
        if key in self.deaths:
            return False
        self.deaths[key] = call.agent
        return True

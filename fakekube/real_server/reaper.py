"""Every write is somebody's last, once: it is performed, not answered, and its sender killed.

A write is known by its key, which says what it does: a successor that does the same again, because
it cannot know that it was done, is left alone. So a life with n different writes has n deaths, and
ends.
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
    """Kills agents whose names begin with `agent`; `kill` returns when that process is dead.

    `key_of` is told the call and what it carries; None: whoever sends that lives.
    """

    agent: str
    key_of: Callable[[Call, bytes], Key | None]
    kill: Callable[[str], Coroutine[None, None, None]]
    deaths: dict[Key, str] = field(default_factory=dict)  # in order; the agent
    seen: dict[Key, int] = field(default_factory=dict)  # that were performed
    _turns: dict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock), repr=False
    )

    def key(self, call: Call, body: bytes) -> Key | None:
        """The key of a call that may be its sender's last."""
        if not call.writes or not call.agent.startswith(self.agent):
            return None
        return self.key_of(call, body)

    def turn(self, agent: str) -> asyncio.Lock:
        """Its writes one by one: else those sent at once would be performed with one death."""
        return self._turns[agent]

    def dies(self, call: Call, key: Key) -> bool:
        """The server has done it: whether its sender is to die of it."""
        self.seen[key] = self.seen.get(key, 0) + 1
        if key in self.deaths:
            return False
        self.deaths[key] = call.agent
        return True

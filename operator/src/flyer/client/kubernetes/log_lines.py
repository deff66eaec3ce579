"""Parser of a container's log: the rank of every line. Pure.

The log has the lines of every rank, each with its rank as a prefix (flyer.job.console):

    2026-11-20T14:05:00.250000000Z rank 3 | a whole line
    2026-11-20T14:05:00.250000000Z rank 3 ~ a piece; the same rank's next piece continues it

The time is the container runtime's. Reading resumes from it after a broken connection: the server
restarts at a whole second, and lines that were already read are skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from flyer.client.logs import LogLine

__all__ = ["PodLog"]

_LINE = re.compile(r"rank (\d+) ([|~]) ?(.*)", re.DOTALL)


@dataclass(slots=True)
class PodLog:
    """Reads one pod's log, over several connections."""

    attempt: int
    node_rank: int
    ranks_per_node: int = 1
    last: str = ""  # the time of the newest line that was taken
    _at_last: int = 0  # lines taken with that very time
    _skip: int = 0
    _pieces: dict[int, str] = field(default_factory=dict)

    def reconnected(self) -> None:
        """The server repeats the lines since the second of the last one."""
        self._skip = self._at_last

    def take(self, raw: str) -> LogLine | None:
        """One line as the server sends it; None: seen before, or only a piece."""
        moment, _, text = raw.partition(" ")
        if moment < self.last:
            return None
        if moment == self.last:
            if self._skip > 0:
                self._skip -= 1
                return None
            self._at_last += 1
        else:
            self.last, self._at_last, self._skip = moment, 1, 0
        match = _LINE.fullmatch(text)
        if match is None:
            # Not through our launcher: the whole container counts as the node's first rank.
            return LogLine(self.attempt, self.node_rank * self.ranks_per_node, text)
        rank, whole, words = int(match[1]), match[2] == "|", match[3]
        text = self._pieces.pop(rank, "") + words
        if not whole:
            self._pieces[rank] = text
            return None
        return LogLine(self.attempt, rank, text.removesuffix("\r"))

    def rest(self) -> list[LogLine]:
        """Remaining incomplete lines at the end of the output."""
        lines = [LogLine(self.attempt, rank, text) for rank, text in sorted(self._pieces.items())]
        self._pieces.clear()
        return lines

"""Reads the ranks' raw output of all attempts, each whole line once.

The ranks' own files are the truth: `logs/<job>/attempt-N/rank-NNNN.log`. A file's last line may
still be in the making, so it waits for its line end, or for the end of the job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["LogLine", "LogReader"]

READ_BYTES_MAX = 1 << 20
ATTEMPT_FOLDER = re.compile(r"attempt-(\d+)")
RANK_FILE = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one rank, without its line end."""

    attempt: int
    rank: int
    text: str


class LogReader:
    """Remembers how far each file was read."""

    def __init__(self, folder: Path, *, rank: int | None, attempt: int | None) -> None:
        self._folder = folder
        self._rank = rank
        self._attempt = attempt
        self._offsets: dict[Path, int] = {}

    def read(self, *, final: bool) -> Iterator[LogLine]:
        """Every line since the last call; with `final` also last lines that have no end."""
        for attempt, rank, path in self._files():
            yield from self._lines(attempt, rank, path, final=final)

    def _files(self) -> list[tuple[int, int, Path]]:
        entries = []
        for path in self._folder.glob("attempt-*/rank-*.log"):
            attempt = ATTEMPT_FOLDER.fullmatch(path.parent.name)
            rank = RANK_FILE.fullmatch(path.name)
            if attempt is None or rank is None:
                continue
            numbers = int(attempt[1]), int(rank[1])
            if self._attempt in (None, numbers[0]) and self._rank in (None, numbers[1]):
                entries.append((*numbers, path))
        return sorted(entries)

    def _lines(self, attempt: int, rank: int, path: Path, *, final: bool) -> Iterator[LogLine]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while data := file.read(READ_BYTES_MAX):
                end = data.rfind(b"\n") + 1
                if end == 0 and len(data) < READ_BYTES_MAX and not final:
                    return
                # a line longer than the read, or the last one of a finished job, goes as it is
                whole = data if end == 0 or (final and len(data) < READ_BYTES_MAX) else data[:end]
                self._offsets[path] = self._offsets.get(path, 0) + len(whole)
                file.seek(self._offsets[path])
                for line in whole.decode(errors="replace").split("\n")[
                    : None if whole[-1:] != b"\n" else -1
                ]:
                    yield LogLine(attempt, rank, line.removesuffix("\r"))

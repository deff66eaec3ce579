"""Memory of a process tree: the sum of proportional set sizes counts shared pages once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

PROC = Path("/proc")


def descendants(root: int) -> list[int]:
    """The process `root` and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended while we looked
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    processes, todo = [], [root]
    while todo:
        process = todo.pop()
        processes.append(process)
        todo.extend(children.get(process, []))
    return processes


def proportional_bytes(process: int) -> int:
    """The PSS of one process, 0 if it has ended."""
    try:
        lines = (PROC / str(process) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


class PeakMemory:
    """Samples a process tree in the background and keeps the highest sum."""

    def __init__(self, root: int, every_seconds: float = 2.0) -> None:
        self.root, self.every_seconds, self.peak_bytes = root, every_seconds, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(self.every_seconds):
            self.peak_bytes = max(
                self.peak_bytes, sum(map(proportional_bytes, descendants(self.root)))
            )

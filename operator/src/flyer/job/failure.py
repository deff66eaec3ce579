"""Failure of a pod, as a value and as `failure.json`: rank, exit status and traceback.

When one rank fails, others fail because of it a moment later. `first()` finds the one to blame.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "FILE_NAME",
    "PEER_ERRORS",
    "TAIL_BYTES_MAX",
    "Failure",
    "first",
    "last_traceback",
    "names_lost_peer",
    "read_failure",
    "traceback_in",
    "write_atomically",
]

FILE_NAME = "failure.json"
TAIL_BYTES_MAX = 64 * 1024
TRACEBACK_CHARACTERS_MAX = 16 * 1024
# Errors by which a rank says that another one is gone; hfreduce's and torch's.
PEER_ERRORS = frozenset({"CollectiveError", "DistBackendError", "DistNetworkError"})
CASCADE_SECONDS = 5.0

# No process dies of these because a peer went away; of SIGABRT it may (a library's watchdog).
_ROOT_SIGNALS = {
    signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
}  # fmt: skip
# Before each line of a traceback that torch prints where there is a process group.
_RANK_MARK = re.compile(r"\[rank\d+\]: ?")
_TRACEBACK_HEAD = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first rank of a pod that failed. Either `exit_status` or `signal` is set."""

    job: str
    attempt: int
    node: str
    node_rank: int
    rank: int
    local_rank: int
    time: float
    """Seconds since the epoch on that node's clock."""
    exit_status: int | None = None
    signal: int | None = None
    error_type: str | None = None
    peer_lost: bool = False
    """It only failed because another rank did, by its own account."""
    traceback: str | None = None
    log_path: str = ""
    version: int = 1

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        if self.signal is None:
            return f"exit status {self.exit_status}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"

    def text(self) -> str:
        """What the user sees last: who failed and how, then the rank's own words as they were."""
        headline = f"rank {self.rank} on node {self.node}: {self.outcome}\n"
        body = self.traceback or f"its output is in {self.log_path}\n"
        return headline + body

    def write(self, run_dir: Path) -> None:
        """Leave `failure.json` in the pod's folder."""
        write_atomically(run_dir / FILE_NAME, json.dumps(asdict(self), indent=1))


def read_failure(run_dir: str | Path) -> Failure | None:
    """What the launcher left, or None: no failure, or a launcher that died itself."""
    try:
        return Failure(**json.loads((Path(run_dir) / FILE_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that the others follow from.

    Within a few seconds of the earliest: a death by a signal comes before an exception that blames
    nobody, that before one that blames a peer; then the earlier one.
    """
    by_time = sorted(failures, key=lambda failure: (failure.time, failure.rank))
    near = [failure for failure in by_time if failure.time <= by_time[0].time + CASCADE_SECONDS]
    return min(near, key=_suspicion, default=None)


def _suspicion(failure: Failure) -> tuple[int, float, int]:
    if failure.signal in _ROOT_SIGNALS:
        kind = 0
    elif failure.signal is not None or failure.peer_lost:
        kind = 2
    else:
        kind = 1
    return kind, failure.time, failure.rank


def last_traceback(log_path: Path, offset: int = 0) -> str | None:
    """The last traceback that a rank printed after `offset`, with the ones it is chained to."""
    try:
        with log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(size - TAIL_BYTES_MAX, min(offset, size)))
            text = log.read().decode(errors="replace")
    except OSError:
        return None
    return traceback_in(text)


def traceback_in(text: str) -> str | None:
    """The last traceback in what a rank printed, with the ones it is chained to."""
    lines = [_RANK_MARK.sub("", line, count=1) for line in text.splitlines()]
    heads = [number for number, line in enumerate(lines) if line == _TRACEBACK_HEAD]
    if not heads:
        return None
    start = heads.pop()
    while heads and any(line in _CHAINED for line in lines[heads[-1] : start]):
        start = heads.pop()
    return ("\n".join(lines[start:]) + "\n")[:TRACEBACK_CHARACTERS_MAX]


def names_lost_peer(traceback: str | None) -> bool:
    """Whether the error at the end of a printed traceback is one about a peer."""
    _, _, last = (traceback or "").rpartition(f"{_TRACEBACK_HEAD}\n")
    error = next((line for line in last.splitlines() if line[:1].strip()), "")
    return error.partition(":")[0].rpartition(".")[2] in PEER_ERRORS


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by rename; a full disk must not hide the failure itself."""
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(OSError):
        partial.write_text(text)
        partial.replace(path)

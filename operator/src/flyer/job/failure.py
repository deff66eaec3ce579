"""Failure of a pod, as a value and as `failure.json`: rank, exit status and traceback.

When one rank fails, its peers fail shortly after. `first()` selects the failure that caused these.
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
# Errors of hfreduce and torch that report the loss of a peer.
PEER_ERRORS = frozenset({"CollectiveError", "DistBackendError", "DistNetworkError"})
CASCADE_SECONDS = 5.0

# The loss of a peer never causes these signals; SIGABRT may be raised by a library's watchdog.
_ROOT_SIGNALS = {
    signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
}  # fmt: skip
# torch's prefix of each line of a traceback once a process group exists.
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
    """Whether the error reports the loss of a peer."""
    traceback: str | None = None
    log_path: str = ""
    version: int = 1

    @property
    def outcome(self) -> str:
        """The exit status or the signal, for messages."""
        if self.signal is None:
            return f"exit status {self.exit_status}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"

    def text(self) -> str:
        """The final message for the user: rank, node and outcome, then the traceback unchanged."""
        headline = f"rank {self.rank} on node {self.node}: {self.outcome}\n"
        body = self.traceback or f"its output is in {self.log_path}\n"
        return headline + body

    def write(self, run_dir: Path) -> None:
        """Write `failure.json` into the pod's folder."""
        write_atomically(run_dir / FILE_NAME, json.dumps(asdict(self), indent=1))


def read_failure(run_dir: str | Path) -> Failure | None:
    """The launcher's `failure.json`; None without a failure, or if the launcher itself died."""
    try:
        return Failure(**json.loads((Path(run_dir) / FILE_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that caused the others.

    Among those within a few seconds of the earliest: a death by a signal comes before an exception
    that names no peer, which comes before one that reports a lost peer; then the earlier one.
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
    """The last traceback in a file after `offset`, with its chained exceptions."""
    try:
        with log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(size - TAIL_BYTES_MAX, min(offset, size)))
            text = log.read().decode(errors="replace")
    except OSError:
        return None
    return traceback_in(text)


def traceback_in(text: str) -> str | None:
    """The last traceback in a rank's output, with its chained exceptions."""
    lines = [_RANK_MARK.sub("", line, count=1) for line in text.splitlines()]
    heads = [number for number, line in enumerate(lines) if line == _TRACEBACK_HEAD]
    if not heads:
        return None
    start = heads.pop()
    while heads and any(line in _CHAINED for line in lines[heads[-1] : start]):
        start = heads.pop()
    return ("\n".join(lines[start:]) + "\n")[:TRACEBACK_CHARACTERS_MAX]


def names_lost_peer(traceback: str | None) -> bool:
    """Whether the error at the end of a traceback reports the loss of a peer."""
    _, _, last = (traceback or "").rpartition(f"{_TRACEBACK_HEAD}\n")
    error = next((line for line in last.splitlines() if line[:1].strip()), "")
    return error.partition(":")[0].rpartition(".")[2] in PEER_ERRORS


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by rename; a full disk must not hide the failure itself."""
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(OSError):
        partial.write_text(text)
        partial.replace(path)

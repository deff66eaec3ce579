"""Benchmark rounds in which rank groups take turns; a waiting group sleeps in a read.

Every rank connects to one UNIX socket, sends `GROUP RANK` and then runs the commands it receives,
one per line (`native/rank.h` defines them). A group that spins while it waits, as MPI's do, spins
in its own turn only, and all groups see the same load on the machine.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["BenchError", "Case", "Contender", "Harness", "RankGroup", "run_rounds"]

GATHER_SECONDS = 150.0
"""Eight processes that import torch from a cold disk take a minute."""
ORDER_SECONDS = 60.0

ROUND_SECONDS = 0.15
"""Approximate time of one contender for one case in one round."""
CALLS_MAX = 50_000


class BenchError(RuntimeError):
    """A measurement that cannot continue."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation that all ranks call: its element type, size, kind of memory and name.

    `size_bytes` is that of the larger buffer, as in nccl-tests: the input of a reduce-scatter, the
    output of an all-gather, each buffer of an all-to-all.
    """

    type: str
    size_bytes: int
    memory: str = "private"
    call: str = "allreduce"

    @property
    def order(self) -> str:
        """The command as the ranks parse it."""
        return f"{self.call} {self.type} {self.size_bytes} {self.memory}"


@dataclass(slots=True)
class RankGroup:
    """Ranks of one implementation, in rank order, each with a separate connection."""

    name: str
    lines: list[socket.socket]

    def order(self, case: Case, count: int, *, check: bool) -> float | None:
        """The slowest rank's seconds for `count` calls; None if the group has no such case."""
        words = self.ask(f"{case.order} {count} {int(check)}")
        refused = [word for word in words if word[:1] != ["ok"]]
        if any("wrong" in word for word in refused):
            raise BenchError(f"{self.name}: wrong result of {case}")
        return None if refused else max(float(word[1]) for word in words)

    def ask(self, command: str) -> list[list[str]]:
        """Sends a command to all ranks and returns the words of their answers."""
        for line in self.lines:
            line.sendall(f"{command}\n".encode())
        until = time.monotonic() + ORDER_SECONDS
        return [self._answer(rank, line, until) for rank, line in enumerate(self.lines)]

    def _answer(self, rank: int, line: socket.socket, until: float) -> list[str]:
        text = b""
        while not text.endswith(b"\n"):
            if not select.select([line], [], [], max(until - time.monotonic(), 0))[0]:
                raise BenchError(f"{self.name}: rank {rank} gave no answer in {ORDER_SECONDS} s")
            more = line.recv(256)
            if not more:
                raise BenchError(f"{self.name}: rank {rank} has ended")
            text += more
        return text.decode().split()


@dataclass(slots=True)
class Contender:
    """A group, and the calls of one round that it makes of each case."""

    group: RankGroup
    counts: dict[Case, int] = field(default_factory=dict)
    seconds: dict[Case, list[float]] = field(default_factory=dict)
    """Seconds of one call, for each round."""

    def warm(self, case: Case) -> None:
        """Runs one checked call, then some that determine the number of calls in a round."""
        if self.group.order(case, 1, check=True) is None:
            return
        seconds = self.group.order(case, 1, check=False) or 0.0
        if seconds < ROUND_SECONDS / 10:
            count = 10
            seconds = (self.group.order(case, count, check=False) or 0.0) / count
        self.counts[case] = max(1, min(CALLS_MAX, int(ROUND_SECONDS / max(seconds, 1e-9))))
        self.seconds[case] = []

    def turn(self, case: Case) -> None:
        """One round."""
        count = self.counts.get(case)
        if count is not None:
            seconds = self.group.order(case, count, check=False)
            assert seconds is not None
            self.seconds[case].append(seconds / count)


def run_rounds(
    rank_groups: Sequence[RankGroup],
    cases: Sequence[Case],
    rounds: int,
    between: Callable[[], None],
) -> dict[str, Contender]:
    """All rounds; `between` is called once in each."""
    lanes = [Contender(group) for group in rank_groups]
    for case in cases:
        for lane in lanes:
            lane.warm(case)
    for number in range(rounds):
        between()
        # Vary the order: no group always finds the caches as the same other group left them.
        at = number % max(len(lanes), 1)
        for case in cases:
            for lane in lanes[at:] + lanes[:at]:
                lane.turn(case)
    return {lane.group.name: lane for lane in lanes}


class Harness:
    """Accepts the ranks' connections; the end of the context closes them and the ranks exit."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "orders"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(256)
        self._lines: dict[tuple[str, int], socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.close()
        self._listener.close()

    def gather(self, name: str, ranks: int, ended: Callable[[], str | None]) -> RankGroup:
        """Waits for all ranks of this group; `ended` returns the reason why they cannot connect."""
        until = time.monotonic() + GATHER_SECONDS
        keys = [(name, rank) for rank in range(ranks)]
        while not all(key in self._lines for key in keys):
            why = ended()
            if why is not None:
                raise BenchError(f"{name}: {why}")
            if time.monotonic() > until:
                missing = [rank for _, rank in keys if (name, rank) not in self._lines]
                raise BenchError(f"{name}: no rank {missing[0]} in {GATHER_SECONDS:.0f} s")
            if select.select([self._listener], [], [], 0.2)[0]:
                line, _ = self._listener.accept()
                line.settimeout(ORDER_SECONDS)
                word, rank = line.recv(256).decode().split()
                self._lines[word, int(rank)] = line
        return RankGroup(name, [self._lines[key] for key in keys])

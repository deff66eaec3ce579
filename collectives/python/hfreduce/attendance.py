"""A barrier over the store of a group's rendezvous, which can name every absent rank.

If a rank is absent, the engine's barrier fails and breaks the group. In this barrier each rank sets
a key in the store, and a failure leaves the group intact. Each rank has one key, whose value is the
number of its last barrier: the store does not grow.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from hfreduce._native import CollectiveError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Attendance"]

PAUSE_MIN_SECONDS: Final = 0.001
PAUSE_MAX_SECONDS: Final = 0.05
VERDICT_SECONDS: Final = 10.0
"""Time beyond its deadline for which a rank waits for the verdict of rank 0, which may be late."""

_VERDICT: Final = "hfreduce/attendance/verdict"


class Attendance:
    """The barriers of one rank in one group; all ranks call `meet` equally often."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._round = 0

    def meet(self, seconds: float, *, all_absent: bool) -> None:
        """Returns once every rank has called it, or raises `CollectiveError` after `seconds`.

        Rank 0 decides: its error has the absent ranks, the first or all, and every rank raises it.
        """
        self._round += 1
        self._store.set(_key(self._rank), str(self._round))
        if self._rank == 0:
            absent = self._wait_for_ranks(seconds)
            absent = absent if all_absent else absent[:1]
            self._store.set(_VERDICT, json.dumps([self._round, absent]))
        else:
            absent = self._wait_for_verdict(seconds)
        if absent:
            raise self._error(absent, seconds)

    def _wait_for_ranks(self, seconds: float) -> list[int]:
        """The ranks that did not arrive in time."""
        until, pause = time.monotonic() + seconds, PAUSE_MIN_SECONDS
        absent = list(range(1, self._size))
        while True:
            absent = [rank for rank in absent if self._value(_key(rank)) < self._round]
            if not absent or time.monotonic() >= until:
                return absent
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_SECONDS)

    def _wait_for_verdict(self, seconds: float) -> list[int]:
        until, pause = time.monotonic() + seconds + VERDICT_SECONDS, PAUSE_MIN_SECONDS
        while time.monotonic() < until:
            if self._store.check([_VERDICT]):
                number, absent = json.loads(self._store.get(_VERDICT))
                if number >= self._round:
                    return [int(rank) for rank in absent] if number == self._round else []
            elif time.monotonic() >= until - VERDICT_SECONDS and self._value(_key(0)) < self._round:
                break
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_SECONDS)
        return [0]

    def _value(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _error(self, absent: list[int], seconds: float) -> CollectiveError:
        names = ", ".join(str(rank) for rank in absent)
        limit = f"{seconds * 1000:.0f} ms"
        failed = f"{'Rank' if len(absent) == 1 else 'Ranks'} {names} failed to pass"
        failed += f" monitoredBarrier in {limit}"
        # torch's tests and users' scripts look for Gloo's words.
        if self._rank == 0:
            text = f"[Rank 0]: {failed}: Rank 0 timed out in monitoredBarrier"
        elif absent == [0]:
            text = f"[Rank {self._rank}]: Rank {self._rank} timed out in monitoredBarrier after "
            text += f"{limit}: rank 0 did not call it"
        else:
            text = f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, "
            text += f"but received errors while waiting for send/recv from rank 0: {failed}"
        error = CollectiveError(text)
        error.kind = "timed_out"
        error.rank, error.peer, error.seen_by = self._rank, absent[0], 0
        error.operation, error.phase, error.detail = "monitored_barrier", "waiting", text
        error.absent = tuple(absent)
        return error


def _key(rank: int) -> str:
    return f"hfreduce/attendance/{rank}"

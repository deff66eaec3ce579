"""Network cards: how the transfers that leave a node share its card.

Only the sending direction is limited. A node receives from few others at once, and the cards of the
senders limit these transfers already.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Card", "Sharing", "Transfer", "card"]


class Sharing(StrEnum):
    """How transfers share a card."""

    FAIR = "fair"
    """All at once, each at an equal part of the rate: sockets and queue pairs."""
    TURNS = "turns"
    """One at a time at the full rate: by kind, then by level, then in the order of arrival. A
    transfer of a more urgent kind or level interrupts, since transfers consist of small chunks."""
    SEPARATE = "separate"
    """Each at the full rate: a card for every rank."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer on a card."""

    owner: int
    """The sending rank; -1 for that of a collective."""
    seconds: float
    urgency: tuple[int, int]
    """Kind and level; smaller is more urgent."""
    ends: Callable[[], None]
    """Called by the simulator at its end."""
    order: int = 0
    """Order of arrival at the card."""
    end: float = inf
    """Time at which it ends; known once it has its turn."""


class Card(Protocol):
    """The sending direction of a card."""

    def add(self, now: float, transfer: Transfer) -> None:
        """A transfer arrives."""

    def next_end(self) -> float:
        """Time at which the next transfer ends; infinite if there is none."""

    def take(self, now: float) -> Transfer:
        """Removes the transfer that ends now."""

    def drop(self, now: float, owner: int) -> None:
        """Removes the transfers of a rank that failed."""


def card(sharing: Sharing) -> Card:
    """An idle card."""
    return _CARDS[sharing]()


@dataclass(slots=True)
class _Fair:
    """Processor sharing. A transfer ends when `progress` has grown by its time."""

    waiting: list[tuple[float, int, Transfer]] = field(default_factory=list)
    progress: float = 0.0
    since: float = 0.0
    count: int = 0

    def _advance(self, now: float) -> None:
        if self.waiting:
            self.progress += (now - self.since) / len(self.waiting)
        self.since = now

    def add(self, now: float, transfer: Transfer) -> None:
        self._advance(now)
        self.count += 1
        heapq.heappush(self.waiting, (self.progress + transfer.seconds, self.count, transfer))

    def next_end(self) -> float:
        if not self.waiting:
            return inf
        return self.since + max(self.waiting[0][0] - self.progress, 0.0) * len(self.waiting)

    def take(self, now: float) -> Transfer:
        self._advance(now)
        return heapq.heappop(self.waiting)[2]

    def drop(self, now: float, owner: int) -> None:
        self._advance(now)
        self.waiting = [entry for entry in self.waiting if entry[2].owner != owner]
        heapq.heapify(self.waiting)


@dataclass(slots=True)
class _Separate:
    waiting: list[tuple[float, int, Transfer]] = field(default_factory=list)
    count: int = 0

    def add(self, now: float, transfer: Transfer) -> None:
        self.count += 1
        heapq.heappush(self.waiting, (now + transfer.seconds, self.count, transfer))

    def next_end(self) -> float:
        return self.waiting[0][0] if self.waiting else inf

    def take(self, now: float) -> Transfer:
        del now
        return heapq.heappop(self.waiting)[2]

    def drop(self, now: float, owner: int) -> None:
        del now
        self.waiting = [entry for entry in self.waiting if entry[2].owner != owner]
        heapq.heapify(self.waiting)


@dataclass(slots=True)
class _Turns:
    holder: Transfer | None = None
    queue: list[tuple[tuple[int, int], int, Transfer]] = field(default_factory=list)
    count: int = 0

    def add(self, now: float, transfer: Transfer) -> None:
        self.count += 1
        transfer.order = self.count
        holder = self.holder
        if holder is not None and transfer.urgency < holder.urgency:
            holder.seconds = holder.end - now
            self._enqueue(holder)
            self.holder = None
        self._enqueue(transfer)
        self._grant(now)

    def _enqueue(self, transfer: Transfer) -> None:
        heapq.heappush(self.queue, (transfer.urgency, transfer.order, transfer))

    def _grant(self, now: float) -> None:
        if self.holder is None and self.queue:
            self.holder = heapq.heappop(self.queue)[2]
            self.holder.end = now + self.holder.seconds

    def next_end(self) -> float:
        return self.holder.end if self.holder else inf

    def take(self, now: float) -> Transfer:
        holder = self.holder
        assert holder is not None  # next_end was finite
        self.holder = None
        self._grant(now)
        return holder

    def drop(self, now: float, owner: int) -> None:
        self.queue = [entry for entry in self.queue if entry[2].owner != owner]
        heapq.heapify(self.queue)
        if self.holder is not None and self.holder.owner == owner:
            self.holder = None
            self._grant(now)


_CARDS: Final[dict[Sharing, type[Card]]] = {
    Sharing.FAIR: _Fair,
    Sharing.TURNS: _Turns,
    Sharing.SEPARATE: _Separate,
}

"""Bytes between this rank and each other rank of the job, as the engine counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfreduce.group import OPEN

from haiscale.trace.spans import Peer

if TYPE_CHECKING:
    from hfreduce.group import Group

__all__ = ["PeerCounts"]


class _Counted:
    """The counters of one group, and their values at the start."""

    def __init__(self, group: Group) -> None:
        self._communicator = group.communicator
        self._ranks = group.membership.global_ranks
        self._before = self._communicator.peer_bytes()

    def since(self) -> list[Peer]:
        """What was moved since the start, by rank of the job."""
        (sent_before, taken_before), (sent, taken) = self._before, self._communicator.peer_bytes()
        changes = zip(self._ranks, sent, sent_before, taken, taken_before, strict=True)
        return [Peer(rank, a - b, c - d) for rank, a, b, c, d in changes]


class PeerCounts:
    """Counts from now on, in the groups that are open now."""

    def __init__(self) -> None:
        self._groups = [_Counted(group) for group in OPEN]

    def since(self) -> tuple[Peer, ...]:
        """What all groups have moved since the start; ranks without bytes are left out."""
        totals: dict[int, Peer] = {}
        for peer in (peer for group in self._groups for peer in group.since()):
            before = totals.get(peer.rank, Peer(peer.rank))
            sent, taken = before.sent + peer.sent, before.taken + peer.taken
            totals[peer.rank] = Peer(peer.rank, sent, taken)
        return tuple(totals[rank] for rank in sorted(totals) if totals[rank] != Peer(rank))

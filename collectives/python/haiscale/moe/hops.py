"""Hops: which rows go to which destination, and the way back. Pure functions of index tensors.

A token takes up to three hops: to the nodes of its experts, to the ranks of its experts there, and,
without a network, to each expert. In every hop a destination gets one copy of a row, whatever the
number of the row's experts there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["ROWS_MAX", "Hop", "Pairs", "Route", "hop"]

ROWS_MAX: Final = 1 << 24
"""Rows of one rank: their numbers travel as float32, next to the weights."""


class Pairs(NamedTuple):
    """Pairs of a row and one of its experts, by row, then by expert."""

    row: Tensor
    expert: Tensor
    weight: Tensor
    """float32; the only one with a gradient."""


@dataclass(frozen=True, slots=True)
class Route:
    """A linear map: copies of rows to destinations; its transpose sums the copies of each row.

    The order of the sums is that of the destinations, so results have the same bits in every run.
    """

    group: dist.ProcessGroup | None
    """Whose ranks are the destinations; None: all are on this rank."""
    index: Tensor
    """The row of each copy, ascending and each once within a destination."""
    rows: int
    sent: list[int]
    """Copies for each destination."""
    received: list[int]
    """Copies from each source."""

    def start(self, tensor: Tensor, *, back: bool) -> tuple[Tensor, Tensor, dist.Work | None]:
        """Starts to move copies of a tensor's rows, or results `back`: source, target, work."""
        source = tensor.contiguous() if back else tensor.index_select(0, self.index)
        if self.group is None:
            return source, source, None
        here, there = (self.sent, self.received) if back else (self.received, self.sent)
        target = source.new_empty(sum(here), *source.shape[1:])
        work: Any = dist.all_to_all_single(target, source, here, there, self.group, async_op=True)
        return source, target, work

    def finish(self, target: Tensor, *, back: bool) -> Tensor:
        """The result, once the work has ended."""
        return self._sum(target) if back else target

    def _sum(self, copies: Tensor) -> Tensor:
        # Rows are unique within a destination: the order of atomic additions on a GPU is the same.
        short = copies.dtype in {torch.bfloat16, torch.float16}
        total = copies.new_zeros(
            self.rows, *copies.shape[1:], dtype=torch.float32 if short else copies.dtype
        )
        parts = zip(torch.split(self.index, self.sent), torch.split(copies, self.sent), strict=True)
        for index, part in parts:
            total.index_add_(0, index, part.to(total.dtype))
        return total.to(copies.dtype)


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of all rows of this rank."""

    copies: Route
    pairs: Route
    place: Tensor
    """The row of each pair among the copies of its destination, in the order of the pairs."""
    expert: Tensor
    """The expert of each pair."""
    offsets: Tensor
    """Where the copies of the source of each received pair start."""

    def packed(self, weight: Tensor) -> Tensor:
        """Place, expert and weight of each pair, which travel together."""
        numbers = torch.stack([self.place, self.expert], 1)
        return torch.cat([numbers.float(), weight.float().unsqueeze(1)], 1)

    def unpacked(self, packed: Tensor) -> Pairs:
        """The pairs that this rank received."""
        numbers = packed.detach()[:, :2].long()
        return Pairs(numbers[:, 0] + self.offsets, numbers[:, 1], packed[:, 2])


def hop(
    group: dist.ProcessGroup | None,
    rows: int,
    pairs: Pairs,
    destination: Tensor,
    *,
    received: tuple[Sequence[int], Sequence[int]] | None,
    destinations: int,
) -> Hop:
    """Lists the copies of a hop.

    Args:
        group: Whose ranks are the destinations; None: no network.
        rows: Rows of this rank.
        pairs: Their experts.
        destination: Of each pair.
        received: Copies and pairs from each source; None: those that are sent.
        destinations: Number of destinations.
    """
    if rows >= ROWS_MAX:
        raise ValueError(
            f"{rows} rows on one rank: expected fewer than {ROWS_MAX}: split the batch"
        )
    order = destination.argsort(stable=True)
    to, row = destination[order], pairs.row[order]
    # Pairs are sorted by destination and row: a copy is a pair that differs from the one before.
    is_first = torch.ones_like(to, dtype=torch.bool)
    is_first[1:] = (to[1:] != to[:-1]) | (row[1:] != row[:-1])
    copy = is_first.cumsum(0) - 1
    counts = torch.bincount(to[is_first], minlength=destinations)
    starts = counts.cumsum(0) - counts
    sent, pairs_sent = counts.tolist(), torch.bincount(to, minlength=destinations).tolist()
    copies_in, pairs_in = received or (sent, pairs_sent)
    bases = torch.tensor([0, *copies_in[:-1]], device=row.device).cumsum(0)
    offsets = bases.repeat_interleave(torch.tensor([*pairs_in], device=row.device))
    place = torch.empty_like(order)
    place[order] = copy - starts[to]
    return Hop(
        Route(group, row[is_first], rows, sent, [*copies_in]),
        Route(group, order, pairs.row.shape[0], pairs_sent, [*pairs_in]),
        place,
        pairs.expert,
        offsets,
    )

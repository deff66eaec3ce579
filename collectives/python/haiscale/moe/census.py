"""Census: what all ranks of a group must know before tokens of a layer move, in one small gather.

It has the number of copies for each node and rank, so that receivers know their buffers' sizes, the
tokens of each expert, for the balance, and whether a rank cannot take part. A rank whose router
failed still sends its census: every rank then raises an error with its name, and none waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from haiscale.moe.errors import ExchangeError, ExpertMismatchError, NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from haiscale.moe.hops import Pairs
    from haiscale.moe.links import Links

__all__ = ["FAILED", "FINE", "NON_FINITE", "Census", "Head", "check_same_layer", "take"]

FINE: Final = 0
NON_FINITE: Final = 1
FAILED: Final = 2
HEAD: Final = 4
"""Numbers before the counts: the layer, its call, the state and the number of tokens."""


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of all ranks, in the order of the links."""

    tokens: Tensor
    """Of each rank."""
    to_node: Tensor
    """Copies, source x node."""
    to_rank: Tensor
    """Copies, source x rank: one for each rank that has an expert of the token."""
    load: Tensor
    """Tokens, source x expert."""

    def across(self, links: Links) -> tuple[list[int], list[int]]:
        """Copies and pairs that arrive here from each node, from the rank of this local index."""
        sources = slice(links.local, None, links.per_node)
        load = self.load[sources].reshape(links.nodes, links.nodes, -1)
        pairs = load[:, links.node].sum(1)
        return self.to_node[sources, links.node].tolist(), pairs.tolist()

    def inside(self, links: Links) -> tuple[list[int], list[int]]:
        """Copies and pairs that arrive here from each rank of this node, after the first hop."""
        shape = (links.nodes, links.per_node)
        copies = self.to_rank[:, links.position].reshape(shape).sum(0)
        load = self.load.reshape(*shape, links.size, -1)
        return copies.tolist(), load[:, :, links.position].sum((0, 2)).tolist()


class Head(NamedTuple):
    """What a rank says about its call, before the counts."""

    name: str
    """Of the layer; not sent."""
    layer: int
    call: int
    state: int
    tokens: int


def take(links: Links, head: Head, pairs: Pairs | None, experts: int) -> Census:
    """Gathers the counts of all ranks.

    Raises:
        NonFiniteError, ExchangeError: On every rank: a rank's scores are not finite, or it failed.
        ExpertMismatchError: On every rank: a rank calls another layer.
    """
    counts = links.nodes + links.size + experts
    own = torch.zeros(HEAD + counts, dtype=torch.int64)
    own[:HEAD] = torch.tensor(head[1:])
    if pairs is not None:
        own[HEAD:] = _counted(links, pairs, experts).cpu()
    table = own.unsqueeze(0) if links.group is None else _gathered(own, links.group, pairs)
    _check(links, head.name, table)
    parts = [links.nodes, links.size, experts]
    to_node, to_rank, load = torch.split(table[:, HEAD:], parts, 1)
    return Census(table[:, 3], to_node, to_rank, load)


def _counted(links: Links, pairs: Pairs, experts: int) -> Tensor:
    load = torch.bincount(pairs.expert, minlength=experts)
    parts = []
    for destinations in (links.nodes, links.size):
        to = pairs.expert // (experts // destinations)
        # Pairs are sorted by row and expert: a copy is a pair that differs from the one before.
        is_first = torch.ones_like(to, dtype=torch.bool)
        is_first[1:] = (to[1:] != to[:-1]) | (pairs.row[1:] != pairs.row[:-1])
        parts.append(torch.bincount(to[is_first], minlength=destinations))
    return torch.cat([*parts, load])


def _gathered(own: Tensor, group: dist.ProcessGroup, pairs: Pairs | None) -> Tensor:
    device = own.device if pairs is None else pairs.row.device
    if dist.get_backend(group) != "nccl":
        device = own.device
    whole = torch.empty(group.size(), own.numel(), dtype=own.dtype, device=device)
    dist.all_gather_into_tensor(whole.view(-1), own.to(device), group)
    return whole.cpu()


def _check(links: Links, name: str, table: Tensor) -> None:
    for position, (number, call, state, _) in enumerate(table[:, :HEAD].tolist()):
        rank = links.ranks[position]
        first = links.ranks[0]
        if [number, call] != table[0, :2].tolist():
            raise ExpertMismatchError(
                name,
                rank,
                f"rank {rank} is in call {call} of layer {number}, rank {first} in call "
                f"{int(table[0, 1])} of layer {int(table[0, 0])}",
                "call the same layers in the same order on every rank",
            )
        if state == NON_FINITE:
            raise NonFiniteError(
                name,
                rank,
                f"scores of the router on rank {rank} are NaN or infinite",
                "look for the first step with such a loss on this rank; its input or a "
                "parameter is not finite",
            )
        if state == FAILED:
            raise ExchangeError(
                name,
                rank,
                f"rank {rank} failed before its tokens were sent",
                "its error is in the log of this rank",
            )


def check_same_layer(links: Links, name: str, description: Mapping[str, int]) -> None:
    """Raises the same ExpertMismatchError on every rank if a rank has another layer."""
    if links.group is None:
        return
    own: Any = torch.tensor([*description.values()], dtype=torch.int64)
    if dist.get_backend(links.group) == "nccl":
        own = own.cuda()
    whole = own.new_empty(links.size * own.numel())
    dist.all_gather_into_tensor(whole, own, links.group)
    table = whole.view(links.size, -1).tolist()
    for rank, values in zip(links.ranks, table, strict=True):
        for field, found, expected in zip(description, values, table[0], strict=True):
            if found != expected:
                raise ExpertMismatchError(
                    name,
                    rank,
                    f"{field} is {found} on rank {rank} and {expected} on rank {links.ranks[0]}",
                    "build the same layer on every rank",
                )

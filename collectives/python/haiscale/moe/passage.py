"""Passage of tokens to their experts and back: up to two hops over a network, and a local one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from haiscale.moe.flights import Flight, move
from haiscale.moe.hops import Hop, Pairs, hop

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from haiscale.moe.census import Census
    from haiscale.moe.experts import Experts
    from haiscale.moe.links import Links

__all__ = ["route"]


def route(
    layer: str,
    links: Links,
    census: Census,
    tokens: Tensor,
    pairs: Pairs,
    experts: Experts,
    meanwhile: Callable[[], object],
) -> Tensor:
    """The weighted sum of each token's experts.

    A token is sent to each node once, to the rank of this local index; that rank sends it once to
    each rank of its node that has an expert for it. Results take the same hops back and are summed
    on the way: over the experts of a rank, then over the ranks of a node, then over the nodes.
    """
    taken: list[tuple[str, Hop]] = []
    for phase, next_hop in _network(links, census):
        current = next_hop(tokens.shape[0], pairs)
        flight = Flight(
            links, layer, f"dispatch {phase}", [current.copies, current.pairs], back=False
        )
        # Only the first transfer has something to overlap with.
        tokens, packed = move(
            flight, [tokens, current.packed(pairs.weight)], None if taken else meanwhile
        )
        pairs = current.unpacked(packed)
        taken.append((phase, current))
    if not taken:
        meanwhile()
    result = _compute(layer, links, tokens, pairs, experts)
    for phase, current in reversed(taken):
        flight = Flight(links, layer, f"combine {phase}", [current.copies], back=True)
        (result,) = move(flight, [result])
    return result


def _network(links: Links, census: Census) -> list[tuple[str, Callable[[int, Pairs], Hop]]]:
    """The hops of these links, as functions of rows and pairs."""
    experts = census.load.shape[1]
    per_node, per_rank = experts // links.nodes, experts // links.size
    hops: list[tuple[str, Callable[[int, Pairs], Hop]]] = []

    def across(rows: int, pairs: Pairs) -> Hop:
        to, received = pairs.expert // per_node, census.across(links)
        return hop(links.across, rows, pairs, to, received=received, destinations=links.nodes)

    def inside(rows: int, pairs: Pairs) -> Hop:
        to, received = pairs.expert % per_node // per_rank, census.inside(links)
        return hop(links.inside, rows, pairs, to, received=received, destinations=links.per_node)

    if links.across is not None:
        hops.append(("across nodes", across))
    if links.inside is not None:
        hops.append(("inside the node", inside))
    return hops


def _compute(layer: str, links: Links, tokens: Tensor, pairs: Pairs, experts: Experts) -> Tensor:
    """Results of the rows of this rank: the sum over this rank's experts."""
    count = experts.gate.shape[0]
    to = pairs.expert - experts.first
    local = hop(None, tokens.shape[0], pairs, to, received=None, destinations=count)
    flight = Flight(links, layer, "experts", [local.copies, local.pairs], back=False)
    rows, weights = move(flight, [tokens, pairs.weight.unsqueeze(1)])
    results = (experts(rows, local.copies.sent) * weights).to(rows.dtype)
    flight = Flight(links, layer, "experts", [local.copies], back=True)
    (result,) = move(flight, [results])
    return result

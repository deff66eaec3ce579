"""Selects the GPUs of a container: the cheapest of all subsets, without heuristics.

The costs of subsets are compared field by field, smaller first:

1. broken: free pairs of which the subset takes one half. A single GPU therefore comes from a
   half-used pair if there is one.
2. loose: chosen GPUs whose bridged partner is not chosen. Two GPUs therefore are a pair.
3. NUMA nodes of the subset.
4. root-complex sharing: pairs of chosen GPUs below one root complex (paper, section IV-D3).
5. sum of the distances to the nearest HCA.
6. the subset itself, lower indices first, which makes the choice deterministic.

A node has 8 GPUs, so there are at most 70 subsets of one size.
"""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, NamedTuple

from flyer_node.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from flyer_node.allocate.topology import GpuTopology

__all__ = ["SUBSETS_MAX", "Cost", "choose", "cost"]

SUBSETS_MAX = 20_000
"""With more subsets (more than 16 GPUs in a node), pairs are taken in order instead."""


class Cost(NamedTuple):
    """Cost of a subset; earlier fields take precedence."""

    broken: int
    loose: int
    numa_nodes: int
    root_sharing: int
    nic_distance: int
    indices: tuple[int, ...]


def cost(topology: GpuTopology, free: int, selection: int) -> Cost:
    """Cost of allocating `selection` out of `free`; both are masks of the topology."""
    broken = loose = 0
    for pair in topology.pairs:
        if (selection & pair).bit_count() == 1:
            loose += 1
            broken += free & pair == pair
    sharing = sum(comb((selection & root).bit_count(), 2) for root in topology.roots)
    indices = tuple(index for index in range(len(topology.gpus)) if selection >> index & 1)
    return Cost(
        broken=broken,
        loose=loose,
        numa_nodes=sum(1 for node in topology.numa if selection & node),
        root_sharing=sharing,
        nic_distance=sum(topology.distances[index] for index in indices),
        indices=indices,
    )


def choose(
    topology: GpuTopology, available: Collection[str], must_include: Collection[str], size: int
) -> Sequence[str]:
    """The cheapest `size` GPUs of `available` that contain `must_include`, in topology order."""
    try:
        free = topology.mask(available)
        must = topology.mask(must_include)
    except KeyError as error:
        raise RequestError("NOT_FOUND", f"GPU {error.args[0]!r} is not on this node") from None
    if must & ~free:
        names = ", ".join(topology.names(must & ~free))
        raise RequestError(
            "INVALID_ARGUMENT", f"must_include has {names}, which are not in available"
        )
    if not must.bit_count() <= size <= free.bit_count():
        raise RequestError(
            "INVALID_ARGUMENT",
            f"invalid allocation_size {size}: expected {must.bit_count()} (must_include) to "
            f"{free.bit_count()} (available)",
        )
    rest = [1 << index for index in range(len(topology.gpus)) if (free & ~must) >> index & 1]
    count = size - must.bit_count()
    if comb(len(rest), count) > SUBSETS_MAX:
        return topology.names(must | sum(_pairs_first(topology, rest)[:count]))
    best = min(cost(topology, free, must | sum(bits)) for bits in combinations(rest, count))
    return tuple(topology.gpus[index] for index in best.indices)


def _pairs_first(topology: GpuTopology, rest: list[int]) -> list[int]:
    """Fallback above SUBSETS_MAX: GPUs of whole free pairs first, then the others."""
    free = sum(rest)
    whole = sum(pair for pair in topology.pairs if free & pair == pair)
    partner = {bit: pair for pair in topology.pairs for bit in (pair & -pair, pair & (pair - 1))}
    return sorted(rest, key=lambda bit: (not bit & whole, partner.get(bit, bit), bit))

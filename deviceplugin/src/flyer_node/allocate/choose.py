"""Which GPUs a container gets: the best of all subsets, never a heuristic.

The cost of a subset is compared field by field, smaller first:

1. broken: pairs that were whole and free before and of which it takes one half. So a single GPU
   comes out of a half-used pair as long as there is one.
2. loose: chosen GPUs whose bridged partner is not chosen. So two GPUs are a pair, not two halves.
3. NUMA nodes it touches.
4. root-complex sharing: couples of chosen GPUs below one root complex (paper, section IV-D3).
5. distance to the nearest HCA, summed.
6. the subset itself, lower indices first: the same question always has the same answer.

Pure; a node has 8 GPUs, so at most 70 subsets of one size.
"""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, NamedTuple

from flyer_node.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from flyer_node.allocate.problem import Board

__all__ = ["SUBSETS_MAX", "Cost", "choose", "cost"]

SUBSETS_MAX = 20_000
"""Above this many subsets (more than 16 GPUs in a machine) the search is cut: pairs in order."""


class Cost(NamedTuple):
    """What a subset costs; the fields' order is their weight."""

    broken: int
    loose: int
    numa_nodes: int
    root_sharing: int
    nic_distance: int
    indices: tuple[int, ...]


def cost(board: Board, free: int, chosen: int) -> Cost:
    """The cost of taking `chosen` when `free` was free; both are masks of the board."""
    broken = loose = 0
    for pair in board.pairs:
        if (chosen & pair).bit_count() == 1:
            loose += 1
            broken += free & pair == pair
    sharing = sum(comb((chosen & root).bit_count(), 2) for root in board.roots)
    indices = tuple(index for index in range(len(board.gpus)) if chosen >> index & 1)
    return Cost(
        broken=broken,
        loose=loose,
        numa_nodes=sum(1 for node in board.numa if chosen & node),
        root_sharing=sharing,
        nic_distance=sum(board.distances[index] for index in indices),
        indices=indices,
    )


def choose(
    board: Board, available: Collection[str], must_include: Collection[str], size: int
) -> Sequence[str]:
    """The best `size` of `available` that contain `must_include`, in the board's order."""
    try:
        free = board.mask(available)
        must = board.mask(must_include)
    except KeyError as error:
        raise RequestError("NOT_FOUND", f"GPU {error.args[0]!r} is not on this node") from None
    if must & ~free:
        names = ", ".join(board.names(must & ~free))
        raise RequestError(
            "INVALID_ARGUMENT", f"must_include has {names}, which available lacks: list them there"
        )
    if not must.bit_count() <= size <= free.bit_count():
        raise RequestError(
            "INVALID_ARGUMENT",
            f"allocation_size {size} is outside {must.bit_count()} (must_include) to "
            f"{free.bit_count()} (available)",
        )
    rest = [1 << index for index in range(len(board.gpus)) if (free & ~must) >> index & 1]
    wanted = size - must.bit_count()
    if comb(len(rest), wanted) > SUBSETS_MAX:
        return board.names(must | sum(_pairs_first(board, rest)[:wanted]))
    best = min(cost(board, free, must | sum(some)) for some in combinations(rest, wanted))
    return tuple(board.gpus[index] for index in best.indices)


def _pairs_first(board: Board, rest: list[int]) -> list[int]:
    """For machines past the bound: GPUs of whole free pairs together, then the others."""
    free = sum(rest)
    whole = sum(pair for pair in board.pairs if free & pair == pair)
    partner = {bit: pair for pair in board.pairs for bit in (pair & -pair, pair & (pair - 1))}
    return sorted(rest, key=lambda bit: (not bit & whole, partner.get(bit, bit), bit))

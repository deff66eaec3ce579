"""Checks of an assignment of ranks against the rules of placement."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from haiscale.placement.errors import LayoutError, Rule, named
from haiscale.placement.nodes import AXES, EXPERT_AXES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from haiscale.placement.nodes import Nodes

__all__ = ["check", "violations"]


def check(
    nodes: Nodes,
    groups: Mapping[str, Sequence[Sequence[int]]],
    *,
    ep_nodes: int = 1,
    stages_per_node: int = 1,
) -> None:
    """Raises the first of the `violations`."""
    for violation in violations(nodes, groups, ep_nodes=ep_nodes, stages_per_node=stages_per_node):
        raise violation


def violations(
    nodes: Nodes,
    groups: Mapping[str, Sequence[Sequence[int]]],
    *,
    ep_nodes: int = 1,
    stages_per_node: int = 1,
) -> list[LayoutError]:
    """The rules that an assignment breaks; empty if it keeps all.

    Args:
        nodes: The nodes of the job.
        groups: For each axis of `AXES` and `EXPERT_AXES` that the job has, its rank lists; each
            list of an axis has every rank of the job at most once, all lists together exactly once.
        ep_nodes: Nodes over which an expert-parallel group may be spread.
        stages_per_node: Pipeline stages that a node may have. Not limited for a job of one node.
    """
    broken = [*_not_a_mesh(nodes, groups)]
    if broken:
        return broken  # the other rules have no meaning for such lists
    broken += _tensor(nodes, groups.get("tp", ()))
    broken += _stages(nodes, groups.get("pp", ()), stages_per_node)
    broken += _crossings(nodes, groups.get("pp", ()))
    broken += _shards(nodes, groups.get("shard", ()))
    broken += _experts(nodes, groups.get("ep", ()), ep_nodes)
    for axis in ("shard", "ep"):
        broken += _uneven(nodes, axis, groups.get(axis, ()))
    return broken


def _not_a_mesh(
    nodes: Nodes, groups: Mapping[str, Sequence[Sequence[int]]]
) -> Iterator[LayoutError]:
    """Axes whose lists are not a mesh of the world."""
    world = nodes.world_size
    known = dict.fromkeys(AXES + EXPERT_AXES)
    for axis, lists in groups.items():
        if axis not in known:
            raise ValueError(f"unknown axis {axis!r}: expected some of {', '.join(known)}")
        counted = Counter(rank for ranks in lists for rank in ranks)
        wrong = sorted(
            {rank for rank in range(world) if counted[rank] != 1} | (counted.keys() - range(world))
        )
        if wrong:
            yield LayoutError(
                Rule.SIZES,
                f"{axis}: ranks {named(wrong)} are not in exactly one group",
                f"list each of the ranks 0 to {world - 1} once",
                ranks=wrong,
            )
        elif len({len(ranks) for ranks in lists}) > 1:
            yield LayoutError(
                Rule.SIZES, f"{axis}: groups differ in size", "give all groups of an axis one size"
            )
    yield from _overlaps(groups)


def _overlaps(groups: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[LayoutError]:
    """Groups of two axes of one mesh that share more than one rank."""
    for axes in (AXES, EXPERT_AXES):
        present = [axis for axis in axes if axis in groups]
        at = {
            axis: {rank: n for n, ranks in enumerate(groups[axis]) for rank in ranks}
            for axis in present
        }
        for axis in present:
            for other in present[: present.index(axis)]:
                for ranks in groups[axis]:
                    there = [at[other].get(rank) for rank in ranks]
                    if len(set(there)) < len(there):
                        yield LayoutError(
                            Rule.SIZES,
                            f"a group of {axis} and a group of {other} share several ranks",
                            "axes of one mesh cross in at most one rank",
                            ranks=ranks,
                        )
                        break


def _tensor(nodes: Nodes, groups: Sequence[Sequence[int]]) -> Iterator[LayoutError]:
    at = {local: index for index, group in enumerate(nodes.nvlink_groups) for local in group}
    for ranks in groups:
        if len(ranks) == 1:
            continue
        where = nodes.names_of(ranks)
        locals_ = [rank % nodes.ranks_per_node for rank in ranks]
        if len(where) > 1:
            problem = f"the tensor-parallel ranks {named(ranks)} are on nodes {named(where)}"
        elif len({at.get(local, -1 - local) for local in locals_}) > 1:
            problem = (
                f"NVLink does not join local ranks {named(locals_)} of the tensor-parallel ranks "
                f"{named(ranks)} on node {where[0]}"
            )
        else:
            continue
        yield LayoutError(
            Rule.TENSOR,
            problem,
            "put each group on the accelerators of one NVLink pair, or pass nvlink= with the "
            "local ranks that are joined",
            ranks=ranks,
            nodes=where,
        )


def _stages(
    nodes: Nodes, groups: Sequence[Sequence[int]], stages_per_node: int
) -> Iterator[LayoutError]:
    if len(nodes.names) == 1:
        return
    stages: dict[int, set[int]] = {}
    for ranks in groups:
        for stage, rank in enumerate(ranks):
            stages.setdefault(nodes.node_of(rank), set()).add(stage)
    for node, own in sorted(stages.items()):
        if len(own) > stages_per_node:
            first = node * nodes.ranks_per_node
            yield LayoutError(
                Rule.STAGE,
                f"node {nodes.names[node]} has the pipeline stages {named(sorted(own))}",
                "give all ranks of a node one stage, or set stages_per_node",
                ranks=range(first, first + nodes.ranks_per_node),
                nodes=[nodes.names[node]],
            )


def _crossings(nodes: Nodes, groups: Sequence[Sequence[int]]) -> Iterator[LayoutError]:
    """Borders between two zones that several pairs of nodes cross."""
    pairs: dict[frozenset[str], dict[tuple[int, int], tuple[int, int]]] = {}
    for ranks in groups:
        for sender, receiver in pairwise(ranks):
            border = frozenset({nodes.zone_of(sender), nodes.zone_of(receiver)})
            if len(border) == 2:
                first, second = sorted((nodes.node_of(sender), nodes.node_of(receiver)))
                pairs.setdefault(border, {})[first, second] = (sender, receiver)
    for border, crossing in pairs.items():
        if len(crossing) > 1:
            involved = [rank for both in crossing.values() for rank in both]
            shown = [f"{nodes.names[a]}-{nodes.names[b]}" for a, b in sorted(crossing)]
            yield LayoutError(
                Rule.CROSSING,
                f"pipelines cross between the zones {named(sorted(border))} over "
                f"{len(crossing)} pairs of nodes, {named(shown)}",
                "put the stages of each pipeline on consecutive nodes of the list",
                ranks=involved,
                nodes=nodes.names_of(involved),
            )


def _shards(nodes: Nodes, groups: Sequence[Sequence[int]]) -> Iterator[LayoutError]:
    for ranks in groups:
        zones = {nodes.zone_of(rank) for rank in ranks}
        if len(zones) > 1:
            where = nodes.names_of(ranks)
            yield LayoutError(
                Rule.SHARD,
                f"the {len(ranks)} shards on ranks {named(ranks)} (nodes {named(where)}) are in "
                f"the zones {named(sorted(zones))}, which have {_zone_sizes(nodes)}",
                "choose a smaller shard and a larger dp, so that the nodes of every zone are a "
                "multiple of the nodes of a shard group and its pipeline",
                ranks=ranks,
                nodes=where,
            )


def _experts(nodes: Nodes, groups: Sequence[Sequence[int]], ep_nodes: int) -> Iterator[LayoutError]:
    for ranks in groups:
        where = nodes.names_of(ranks)
        zones = {nodes.zone_of(rank) for rank in ranks}
        if len(where) > ep_nodes:
            problem = f"are on {len(where)} nodes, {named(where)}; ep_nodes is {ep_nodes}"
            remedy = f"choose a smaller ep, or set ep_nodes to {len(where)} if tokens may leave "
            remedy += "their node"
        elif len(zones) > 1:
            problem = f"are in the zones {named(sorted(zones))}"
            remedy = "choose an ep whose nodes fit into a zone"
        else:
            continue
        yield LayoutError(
            Rule.EXPERT,
            f"the expert-parallel ranks {named(ranks)} {problem}",
            remedy,
            ranks=ranks,
            nodes=where,
        )


def _uneven(nodes: Nodes, axis: str, groups: Sequence[Sequence[int]]) -> Iterator[LayoutError]:
    """A group with another number of ranks on a node than the first group has on its first node."""
    expected = 0
    for ranks in groups:
        counts = Counter(nodes.node_of(rank) for rank in ranks)
        expected = expected or next(iter(counts.values()))
        if set(counts.values()) != {expected}:
            shown = [f"{nodes.names[node]}: {count}" for node, count in sorted(counts.items())]
            yield LayoutError(
                Rule.EVEN,
                f"{axis}: the ranks {named(ranks)} are not spread like those of the first group, "
                f"{expected} on each node ({named(shown)})",
                f"choose {axis} as a divisor or a multiple of the replicas that a node has of a "
                "stage",
                ranks=ranks,
                nodes=nodes.names_of(ranks),
            )


def _zone_sizes(nodes: Nodes) -> str:
    return ", ".join(f"{zone}: {count} nodes" for zone, count in Counter(nodes.zones).items())

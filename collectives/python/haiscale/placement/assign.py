"""Assignment of the ranks of a job to the parallel axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from haiscale.placement.errors import LayoutError, Rule, named
from haiscale.placement.nodes import AXES, EXPERT_AXES, Nodes, Sizes
from haiscale.placement.rules import check

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Layout", "place"]


@dataclass(frozen=True, slots=True)
class Layout:
    """An assignment of all ranks to the axes."""

    nodes: Nodes
    sizes: Sizes
    ranks: tuple[int, ...]
    """The ranks in the order of `AXES`, which is that of `EXPERT_AXES`; the last axis is inner."""

    def shape(self, axes: Sequence[str] = AXES) -> tuple[int, ...]:
        """Sizes of these axes."""
        sizes = self.sizes
        expert_dp = sizes.dp * sizes.shard // sizes.ep
        known = {"pp": sizes.pp, "dp": sizes.dp, "shard": sizes.shard, "tp": sizes.tp}
        known |= {"expert_dp": expert_dp, "ep": sizes.ep}
        return tuple(known[axis] for axis in axes)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The rank lists of one axis, each in the order of the axis."""
        axes = AXES if axis in AXES else EXPERT_AXES
        shape, at = self.shape(axes), axes.index(axis)
        inner, size = prod(shape[at + 1 :]), shape[at]
        return [
            self.ranks[outer + offset : outer + size * inner : inner]
            for outer in range(0, len(self.ranks), size * inner)
            for offset in range(inner)
        ]

    def all_groups(self) -> dict[str, list[tuple[int, ...]]]:
        """The rank lists of every axis."""
        return {axis: self.groups(axis) for axis in dict.fromkeys(AXES + EXPERT_AXES)}


def place(nodes: Nodes, sizes: Sizes) -> Layout:
    """The layout of a job by rule.

    Raises:
        LayoutError: No placement of these sizes on these nodes keeps the rules.
    """
    _multiply_to_world(nodes, sizes)
    slots = _tensor_slots(nodes, sizes.tp)
    stages_per_node = _stages_per_node(nodes, sizes, len(slots))
    chain = sizes.pp // stages_per_node
    order = nodes.by_zone()
    replicas = len(slots) // stages_per_node
    ranks = tuple(
        order[start + stage // stages_per_node] * nodes.ranks_per_node + local
        for stage in range(sizes.pp)
        for start in range(0, len(order), chain)
        for slot in range(replicas)
        for local in slots[stage % stages_per_node * replicas + slot]
    )
    layout = Layout(nodes, sizes, ranks)
    check(nodes, layout.all_groups(), ep_nodes=sizes.ep_nodes, stages_per_node=stages_per_node)
    return layout


def _multiply_to_world(nodes: Nodes, sizes: Sizes) -> None:
    have, want = nodes.world_size, sizes.world_size
    if have != want:
        others = want // sizes.dp
        remedy = (
            f"set dp to {have // others}"
            if have % others == 0
            else f"choose sizes whose product is {have}"
        )
        product = f"dp {sizes.dp} x shard {sizes.shard} x pp {sizes.pp} x tp {sizes.tp}"
        raise LayoutError(
            Rule.SIZES,
            f"{product} is {want}, but {len(nodes.names)} nodes of {nodes.ranks_per_node} ranks "
            f"have {have}",
            remedy,
        )
    if sizes.dp * sizes.shard % sizes.ep:
        raise LayoutError(
            Rule.SIZES,
            f"ep {sizes.ep} does not divide dp {sizes.dp} x shard {sizes.shard}",
            f"choose a divisor of {sizes.dp * sizes.shard}",
        )


def _tensor_slots(nodes: Nodes, tp: int) -> list[tuple[int, ...]]:
    """Local ranks of each tensor-parallel group of a node, in the order of their first rank."""
    if tp == 1:
        return [(local,) for local in range(nodes.ranks_per_node)]
    slots = [
        group[start : start + tp]
        for group in nodes.nvlink_groups
        for start in range(0, len(group) // tp * tp, tp)
    ]
    used = {local for slot in slots for local in slot}
    if alone := [local for local in range(nodes.ranks_per_node) if local not in used]:
        linked = sorted({len(group) for group in nodes.nvlink_groups}) or [0]
        raise LayoutError(
            Rule.TENSOR,
            f"tp {tp} leaves local ranks {named(alone)} of every node without a group; NVLink "
            f"joins {' or '.join(map(str, linked))} accelerators",
            "choose a divisor of that number, or pass nvlink= with the local ranks that are joined",
            ranks=alone,
            nodes=nodes.names,
        )
    return sorted(slots)


def _stages_per_node(nodes: Nodes, sizes: Sizes, slots: int) -> int:
    """Stages of each node, after a check that they divide the job."""
    count = len(nodes.names)
    stages = sizes.stages_per_node or (sizes.pp if count == 1 else 1)
    undivided = []
    if sizes.pp % stages:
        undivided.append(f"pp {sizes.pp}")
    if slots % stages:
        undivided.append(f"the {slots} groups of tp {sizes.tp} on a node")
    if undivided:
        raise LayoutError(
            Rule.STAGE,
            f"{stages} stages per node do not divide {' and '.join(undivided)}",
            "choose a common divisor of both as stages_per_node",
            nodes=nodes.names,
        )
    chain = sizes.pp // stages
    if count % chain:
        whole = [str(n) for n in range(1, count + 1) if count % n == 0]
        raise LayoutError(
            Rule.STAGE,
            f"pp {sizes.pp} with {stages} stages per node takes {chain} nodes for each pipeline, "
            f"which do not divide {count} nodes",
            f"choose pp from {', '.join(whole)}, or set stages_per_node to put several stages on "
            "a node",
            nodes=nodes.names,
        )
    return stages

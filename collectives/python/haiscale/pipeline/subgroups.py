"""`make_subgroups`: the process groups of replicas and pipelines, placed by rule.

Scripts that start the ranks of a node by themselves find the number of nodes in WORLD_SIZE; under
torchrun it is the number of ranks. The size of the default group distinguishes the two.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from haiscale.internals.groups import local_group
from haiscale.mesh import job_nodes
from haiscale.placement import LayoutError, Nodes, Rule, Sizes, place

__all__ = ["make_subgroups"]


def make_subgroups(pp_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The replicas of this rank's stage and the ranks of its pipeline. Every rank calls it.

    Stages of a pipeline are on different nodes where there are enough; replicas share a node, as
    `haiscale.mesh` places them.

    Args:
        pp_size: Number of ranks of each pipeline.

    Raises:
        LayoutError: `pp_size` does not divide the ranks, or the pipelines cannot be placed on these
            nodes. No group has been created.
    """
    ranks = dist.get_world_size()
    if pp_size < 1 or ranks % pp_size:
        raise LayoutError(
            Rule.SIZES,
            f"pp_size={pp_size!r} does not divide the {ranks} ranks of the default group",
            "pass the number of ranks of each pipeline, a divisor of that number",
        )
    nodes = _nodes(ranks)
    per_node = max(1, pp_size // len(nodes.names))
    sizes = Sizes(dp=ranks // pp_size, pp=pp_size, stages_per_node=per_node)
    layout = place(nodes, sizes)
    groups = {}
    for axis in ("pp", "dp"):
        own = next(each for each in layout.groups(axis) if dist.get_rank() in each)
        groups[axis] = local_group(own, group_desc=axis, sort_ranks=False)
    return groups["dp"], groups["pp"]


def _nodes(ranks: int) -> Nodes:
    text = os.environ.get("WORLD_SIZE", "")
    if not text and os.environ.get("FLYER_TOPOLOGY"):
        return job_nodes(ranks)
    # A job of one process has no WORLD_SIZE, as in the scripts.
    started = int(text) if text.isdecimal() and int(text) > 0 else 1
    if ranks % started:
        raise ValueError(
            f"WORLD_SIZE={started}, but the default group has {ranks} ranks: start the same number "
            "of ranks on each node"
        )
    nodes = job_nodes(started, {"LOCAL_WORLD_SIZE": "1", **os.environ})
    return Nodes(nodes.names, nodes.zones, nodes.ranks_per_node * (ranks // started))

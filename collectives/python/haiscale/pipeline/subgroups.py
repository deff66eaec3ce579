"""`make_subgroups`: the process groups of replicas and pipelines, placed by rule.

Scripts that start the ranks of a node by themselves find the number of nodes in WORLD_SIZE; under
torchrun it is the number of ranks. The size of the default group distinguishes the two.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from haiscale.internals.groups import local_group
from haiscale.mesh import job_nodes
from haiscale.placement import Nodes, Sizes, place

__all__ = ["make_subgroups"]


def make_subgroups(pp_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The replicas of this rank's stage and the ranks of its pipeline. Every rank calls it.

    Stages of a pipeline are on different nodes where there are enough; replicas share a node, as
    `haiscale.mesh` places them.

    Args:
        pp_size: Number of ranks of each pipeline.

    Raises:
        LayoutError: The pipelines cannot be placed on these nodes. No group has been created.
    """
    ranks = dist.get_world_size()
    nodes = _nodes(ranks)
    per_node = max(1, pp_size // len(nodes.names))
    sizes = Sizes(dp=max(1, ranks // pp_size), pp=pp_size, stages_per_node=per_node)
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

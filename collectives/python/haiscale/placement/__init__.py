"""Placement of the parallel axes on nodes: `place` assigns ranks, `violations` checks them.

Pure: nodes and sizes in, lists of ranks out. The rules, and which figure each one protects:

- `tp-in-nvlink`: a tensor-parallel group stays among accelerators that NVLink joins (paper, V-B1).
- `stage-per-node`: the ranks of a node are replicas of one pipeline stage, so that their transfers
  over the node's only card are spread in time, and their gradients are reduced inside the node
  first (paper, V-B2).
- `shard-in-zone`: the shards of one replica stay in one zone; replicas may be in several (HSDP).
- `ep-in-nodes`: an expert-parallel group stays in a node, or in `ep_nodes` nodes of one zone.
- `one-crossing`: pipelines cross from one zone to another over at most one pair of nodes.
- `even-nodes`: the shards and the experts of all groups are spread over nodes in the same numbers.

A node list is split into chains of consecutive nodes, and a chain has one node for each stage.
Replicas are numbered along the chains, so at most one chain crosses each border between zones.
"""

from haiscale.placement.assign import Layout, place
from haiscale.placement.errors import LayoutError, Rule
from haiscale.placement.nodes import AXES, EXPERT_AXES, Nodes, Sizes
from haiscale.placement.rules import check, violations

__all__ = [
    "AXES",
    "EXPERT_AXES",
    "Layout",
    "LayoutError",
    "Nodes",
    "Rule",
    "Sizes",
    "check",
    "place",
    "violations",
]

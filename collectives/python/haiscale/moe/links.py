"""Links: the groups of ranks over which the experts of a model's layers are spread.

A rank exchanges tokens with the rank of the same local index on each other node (`across`), and
with the ranks of its node (`inside`), whose messages HFReduce passes through shared memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from haiscale.ddp import groups
from haiscale.internals.groups import local_group
from haiscale.moe.errors import ExchangeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from haiscale.mesh import Meshes
    from haiscale.placement import Nodes

__all__ = ["Counters", "Links", "connect"]

MARK: Final = "haiscale.moe:"
"""Before the rank to blame, in the reason of an abort."""


@dataclass(slots=True)
class Counters:
    """What this rank's layers sent to other nodes."""

    tokens: int = 0
    """Tokens of all forward passes."""
    copies: int = 0
    """Copies of tokens that left the node in forward passes."""
    pairs: int = 0
    """Pairs of a token and an expert on another node: copies with one for each expert."""
    bytes: int = 0
    """Payload of exchanges between nodes, forward and backward."""


def _this_rank() -> tuple[int, ...]:
    return (dist.get_rank() if dist.is_initialized() else 0,)


@dataclass(slots=True)
class Links:
    """Groups of one rank; the default is this rank alone with all experts."""

    ranks: tuple[int, ...] = field(default_factory=_this_rank)
    """The job's ranks in the order of their experts."""
    position: int = 0
    """Index of this rank in `ranks`."""
    nodes: int = 1
    """Nodes of `ranks`, each with the same number of consecutive positions."""
    group: dist.ProcessGroup | None = None
    """All ranks; None: there is one."""
    across: dist.ProcessGroup | None = None
    """One rank of each node, in the order of the nodes; None: there is one node."""
    inside: dist.ProcessGroup | None = None
    """The ranks of this node; None: there is one."""
    counters: Counters = field(default_factory=Counters)
    layers: int = 0
    """Layers created so far, for their names."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def per_node(self) -> int:
        """Ranks of each node."""
        return self.size // self.nodes

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.position // self.per_node

    @property
    def local(self) -> int:
        """Index of this rank on its node."""
        return self.position % self.per_node

    def __deepcopy__(self, _memo: object) -> Links:
        """The same groups: copies of a model are on the same ranks."""
        return self

    def failed(
        self, layer: str, phase: str, error: Exception, group: dist.ProcessGroup | None
    ) -> ExchangeError:
        """The error of a collective of a group, after the waits of all ranks were ended.

        The job's rank to blame is passed on: a rank that waits for another one, which has an error
        because of a third, names the third.
        """
        marked = re.search(rf"{MARK} rank (\d+) failed", str(error))
        peer = getattr(error, "peer", None)
        rank: int | None = None
        if marked is not None:
            rank = int(marked[1])
        elif group is not None and isinstance(peer, int):
            rank = dist.get_process_group_ranks(group)[peer]
        self._abort("a rank failed" if rank is None else f"rank {rank} failed", f"{phase}: {error}")
        blamed = "" if rank is None else f"rank {rank} failed: "
        remedy = "restart the job from its last checkpoint"
        return ExchangeError(layer, rank, f"{phase}: {blamed}{error}", remedy)

    def failed_here(self, layer: str, error: Exception) -> None:
        """Ends the waits of the other ranks after an error of this one."""
        self._abort(f"rank {self.ranks[self.position]} failed", f"layer {layer!r}: {error}")

    def _abort(self, who: str, why: str) -> None:
        all_groups = {g for g in (self.group, self.across, self.inside) if g is not None}
        groups.abort(all_groups, f"{MARK} {who}: {why}")


def connect(
    meshes: Meshes | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    nodes: Nodes | None = None,
) -> Links:
    """The links of the mesh's axis ep. Every rank calls it once and gives it to all its layers.

    Args:
        meshes: Of `haiscale.mesh.build`. None: `group` and `nodes` instead.
        group: A group with the same number of ranks on each node, node by node.
        nodes: The nodes of the job.

    Raises:
        ValueError: The ranks of a node are not consecutive in the group, or differ in number.
    """
    if meshes is not None:
        if meshes.expert is None:
            return Links()
        group, nodes = meshes.expert.get_group("ep"), meshes.layout.nodes
    if group is None or nodes is None:
        raise ValueError("connect needs the meshes, or a group and the nodes of the job")
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return Links(ranks)
    by_node = _by_node(ranks, nodes)
    position = ranks.index(dist.get_rank())
    count, per_node = len(by_node), len(by_node[0])
    across = inside = None
    if per_node == 1 or count == 1:
        # One of the two is the whole group.
        across, inside = (group, None) if per_node == 1 else (None, group)
    else:
        across = _created(group, [each[position % per_node] for each in by_node])
        inside = _created(group, by_node[position // per_node])
    return Links(ranks, position, count, group, across, inside)


def _by_node(ranks: Sequence[int], nodes: Nodes) -> list[list[int]]:
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(nodes.node_of(rank), []).append(rank)
    lists = [*by_node.values()]
    sizes = {nodes.names[node]: len(each) for node, each in by_node.items()}
    if len(set(sizes.values())) > 1 or [r for each in lists for r in each] != [*ranks]:
        raise ValueError(
            f"the ranks {list(ranks)} have {sizes} on their nodes: expected equal numbers, and "
            "those of a node one after the other, as haiscale.mesh places them"
        )
    return lists


def _created(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of some ranks with the backend of another one, before the gradients'."""
    backend = dist.get_backend(group)
    options: Any = None
    if backend == "hfreduce":
        from hfreduce.torch import Options

        options = Options(priority="high")
    return local_group(
        ranks, backend=backend, pg_options=options, group_desc="moe", sort_ranks=False
    )

"""Nodes of a job, and the sizes of the parallel axes on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from haiscale.placement.errors import LayoutError, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AXES", "EXPERT_AXES", "Nodes", "Sizes"]

AXES: Final = ("pp", "dp", "shard", "tp")
"""Axes of the mesh for dense parameters, outermost first."""
EXPERT_AXES: Final = ("pp", "expert_dp", "ep", "tp")
"""Axes of the mesh for experts: the same ranks in the same order, `dp` x `shard` divided anew."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job in rank order: rank r is on node r // `ranks_per_node`."""

    names: tuple[str, ...]
    zones: tuple[str, ...]
    ranks_per_node: int
    nvlink: tuple[tuple[int, ...], ...] | None = None
    """Local ranks whose accelerators NVLink joins. Default: consecutive pairs, (0, 1), (2, 3), …"""

    def __post_init__(self) -> None:
        """Refuses lists that do not describe nodes."""
        if not self.names or len(self.names) != len(self.zones):
            raise ValueError(
                f"invalid nodes: {len(self.names)} names and {len(self.zones)} zones: expected "
                "one zone for each of at least one name"
            )
        if len(set(self.names)) < len(self.names):
            name, count = Counter(self.names).most_common(1)[0]
            raise ValueError(f"invalid nodes: {name!r} is there {count} times: expected each once")
        if self.ranks_per_node < 1:
            raise ValueError(f"invalid ranks_per_node {self.ranks_per_node}: expected at least 1")
        joined = [local for group in self.nvlink or () for local in group]
        if len(set(joined)) < len(joined) or not set(joined) <= set(range(self.ranks_per_node)):
            raise ValueError(
                f"invalid nvlink {self.nvlink}: expected local ranks below {self.ranks_per_node}, "
                "each in at most one group"
            )

    @classmethod
    def one(
        cls, ranks: int, name: str = "node", *, nvlink: tuple[tuple[int, ...], ...] | None = None
    ) -> Nodes:
        """One node with all ranks."""
        return cls((name,), ("zone",), ranks, nvlink)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.names) * self.ranks_per_node

    @property
    def nvlink_groups(self) -> tuple[tuple[int, ...], ...]:
        """Local ranks joined by NVLink, with the default."""
        if self.nvlink is not None:
            return self.nvlink
        return tuple((local, local + 1) for local in range(0, self.ranks_per_node - 1, 2))

    def node_of(self, rank: int) -> int:
        """Index of a rank's node."""
        return rank // self.ranks_per_node

    def zone_of(self, rank: int) -> str:
        """Zone of a rank's node."""
        return self.zones[self.node_of(rank)]

    def names_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Names of the nodes of these ranks, in rank order, each once."""
        return tuple(self.names[node] for node in sorted({self.node_of(rank) for rank in ranks}))

    def by_zone(self) -> list[int]:
        """Indices of the nodes, zones in the order of their first node."""
        first = {zone: index for index, zone in reversed([*enumerate(self.zones)])}
        return sorted(range(len(self.names)), key=lambda node: (first[self.zones[node]], node))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the axes; dp x shard x pp x tp is the number of ranks, and ep divides dp x shard."""

    dp: int = 1
    """Replicas. Gradients are averaged over them."""
    shard: int = 1
    """Ranks over which one replica's parameters are sharded (FSDP)."""
    pp: int = 1
    """Pipeline stages."""
    tp: int = 1
    """Ranks that share one layer's matrices."""
    ep: int = 1
    """Ranks over which the experts of a layer are spread."""
    ep_nodes: int = 1
    """Nodes over which an expert-parallel group may be spread, all in one zone."""
    stages_per_node: int | None = None
    """Pipeline stages on one node. Default: 1, and all stages for a job of one node."""

    def __post_init__(self) -> None:
        """Refuses anything but whole numbers above 0."""
        for name in ("dp", "shard", "pp", "tp", "ep", "ep_nodes", "stages_per_node"):
            value = getattr(self, name)
            if value is None and name == "stages_per_node":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(
                    Rule.SIZES, f"invalid {name} {value!r}", "pass a whole number above 0"
                )

    @property
    def world_size(self) -> int:
        """Number of ranks that the sizes describe."""
        return self.dp * self.shard * self.pp * self.tp

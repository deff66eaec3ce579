"""Device meshes of a job, placed by rule on its nodes.

    meshes = haiscale.mesh.build(dp=2, shard=4, pp=4, tp=2)
    model = fully_shard(model, mesh=meshes.dense["dp", "shard"])

`build` reads the nodes from FLYER_TOPOLOGY, assigns the ranks by the rules of `haiscale.placement`,
and creates the process groups. `check_mesh` checks a mesh that a script made by itself.

The groups are created by `new_group` in the order of their axis, and only by their members; a mesh
of `init_device_mesh` sorts the ranks of each group, which is not always the order of the stages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hfreduce import SettingError, load_topology

from haiscale.placement import AXES, EXPERT_AXES, Layout, Nodes, Sizes, check, place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Meshes", "build", "check_mesh", "job_nodes"]

URGENT: Final = frozenset({"tp", "ep"})
"""Axes whose collectives delay the next operation of a layer: they precede gradients."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """The meshes of this rank."""

    layout: Layout
    dense: DeviceMesh
    """Axes `AXES`. Each is there, also with one rank."""
    expert: DeviceMesh | None
    """Axes `EXPERT_AXES`; None where ep is 1."""

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of tp ranks, that read different data."""
        return self.layout.sizes.dp * self.layout.sizes.shard

    @property
    def data_rank(self) -> int:
        """Index of this rank's data."""
        shard = self.layout.sizes.shard
        return self.dense.get_local_rank("dp") * shard + self.dense.get_local_rank("shard")


def build(
    sizes: Sizes,
    *,
    nodes: Nodes | None = None,
    device_type: str = "cpu",
    timeout: timedelta | None = None,
) -> Meshes:
    """The meshes of a job. Every rank calls it with the same arguments, after init_process_group.

    Args:
        sizes: Sizes of the axes, and what they may do beyond the rules.
        nodes: The nodes; default: `job_nodes`.
        device_type: "cpu" or "cuda".
        timeout: Deadline of the groups' operations; default: torch's.

    Raises:
        LayoutError: The sizes break a rule on these nodes. No group has been created.
    """
    import torch.distributed as dist

    layout = place(nodes or job_nodes(dist.get_world_size()), sizes)
    if layout.nodes.world_size != dist.get_world_size():
        raise ValueError(
            f"nodes have {layout.nodes.world_size} ranks, but the default group has "
            f"{dist.get_world_size()}: pass the nodes of this job"
        )
    groups = _Groups(layout, timeout)
    dense = _mesh(layout, AXES, groups, device_type)
    expert = _mesh(layout, EXPERT_AXES, groups, device_type) if sizes.ep > 1 else None
    return Meshes(layout, dense, expert)


def check_mesh(
    mesh: DeviceMesh,
    *,
    nodes: Nodes | None = None,
    names: Mapping[str, str] | None = None,
    ep_nodes: int = 1,
    stages_per_node: int = 1,
) -> None:
    """Checks a mesh against the rules of placement.

    Args:
        mesh: A mesh of all ranks, with named axes.
        nodes: The nodes; default: `job_nodes`.
        names: Our axis for each axis of the mesh, for example ``{"dp_replicate": "dp"}``; axes that
            are not listed have our names.
        ep_nodes: Nodes over which an expert-parallel group may be spread.
        stages_per_node: Pipeline stages that a node may have.

    Raises:
        LayoutError: The first rule that the mesh breaks.
    """
    import torch.distributed as dist

    axes = mesh.mesh_dim_names
    if axes is None:
        raise ValueError("the mesh has no names of axes: pass mesh_dim_names when it is created")
    ours = {axis: (names or {}).get(axis, axis) for axis in axes}
    if unknown := sorted((names or {}).keys() - set(axes)):
        raise ValueError(f"names has {unknown[0]!r}, which is not an axis of the mesh: {axes}")
    ranks = mesh.mesh
    groups = {
        ours[axis]: ranks.movedim(index, -1).reshape(-1, ranks.shape[index]).tolist()
        for index, axis in enumerate(axes)
    }
    check(
        nodes or job_nodes(dist.get_world_size()),
        groups,
        ep_nodes=ep_nodes,
        stages_per_node=stages_per_node,
    )


def job_nodes(
    world_size: int | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    nvlink: tuple[tuple[int, ...], ...] | None = None,
) -> Nodes:
    """The nodes of this job: from FLYER_TOPOLOGY, else from torchrun's variables, in one zone.

    Args:
        world_size: Number of ranks; default: WORLD_SIZE, or 1.
        environment: Variables; default: those of the process.
        nvlink: Local ranks whose accelerators NVLink joins; default: consecutive pairs.

    Raises:
        TopologyError: The file is invalid, or has another number of ranks.
        SettingError: A variable of torchrun is invalid, or missing in a job of several ranks.
    """
    variables = os.environ if environment is None else environment
    world = world_size or _number(variables, "WORLD_SIZE", 1)
    if path := variables.get("FLYER_TOPOLOGY"):
        topology = load_topology(path)
        topology.places([0], world)  # raises if the file has another number of ranks
        return Nodes(
            tuple(place.node for place in topology.nodes),
            tuple(place.zone for place in topology.nodes),
            topology.ranks_per_node,
            nvlink,
        )
    local = _number(variables, "LOCAL_WORLD_SIZE", world if _is_local(variables, world) else 0)
    if local == 0 or world % local:
        raise SettingError(
            "LOCAL_WORLD_SIZE",
            variables.get("LOCAL_WORLD_SIZE", ""),
            f"the number of ranks on each node, a divisor of {world}; torchrun and flyer set it",
        )
    zone = variables.get("FLYER_ZONE") or "default"
    count = world // local
    return Nodes(tuple(f"node-{n}" for n in range(count)), (zone,) * count, local, nvlink)


def _is_local(variables: Mapping[str, str], world: int) -> bool:
    """Whether all ranks are certainly on one node."""
    return world == 1 or variables.get("MASTER_ADDR") in {"localhost", "127.0.0.1", "::1"}


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name)
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise SettingError(name, text, "a whole number above 0")
    return int(text)


class _Groups:
    """Creates this rank's group of each axis."""

    def __init__(self, layout: Layout, timeout: timedelta | None) -> None:
        import torch.distributed as dist

        self._layout = layout
        self._timeout = timeout
        self._rank = dist.get_rank()
        self._is_hfreduce = dist.get_backend() == "hfreduce"
        self._created: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of an axis; equal lists of one priority share one."""
        ranks = next(ranks for ranks in self._layout.groups(axis) if self._rank in ranks)
        priority = "high" if axis in URGENT and len(ranks) > 1 else "normal"
        key = ranks, priority
        if key not in self._created:
            self._created[key] = self._create(axis, ranks, priority)
        return self._created[key]

    def _create(self, axis: str, ranks: tuple[int, ...], priority: str) -> dist.ProcessGroup:
        import torch.distributed as dist

        if priority == "normal" and ranks == tuple(range(dist.get_world_size())):
            world = dist.group.WORLD
            assert world is not None  # this group is initialized
            return world
        options = None
        if self._is_hfreduce and priority == "high":
            from hfreduce.torch import Options

            options = Options(priority="high")
        from haiscale.internals.groups import local_group

        return local_group(
            ranks,
            timeout=self._timeout,
            pg_options=options,
            group_desc=f"mesh_{axis}",
            sort_ranks=False,
        )


def _mesh(layout: Layout, axes: Sequence[str], groups: _Groups, device_type: str) -> DeviceMesh:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.tensor(layout.ranks, dtype=torch.int).view(layout.shape(axes))
    return DeviceMesh.from_group(
        [groups.group(axis) for axis in axes], device_type, ranks, mesh_dim_names=tuple(axes)
    )

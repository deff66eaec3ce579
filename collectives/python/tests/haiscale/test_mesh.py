"""Device meshes: groups of real ranks in the order of their axes, and the nodes of a job."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from haiscale.mesh import build, check_mesh, job_nodes
from haiscale.placement import LayoutError, Nodes, Rule, Sizes
from hfreduce import SettingError, TopologyError
from hfreduce.testing import Layout, run, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.torch

ALL = Sizes(dp=2, shard=2, pp=2, ep=2)


def sums(mesh, rank):
    """Per axis: the group's ranks in its order, this rank's place, and the sum of all ranks."""
    axes = {}
    for axis in mesh.mesh_dim_names:
        group = mesh.get_group(axis)
        dist.all_reduce(total := torch.tensor([float(rank)]), group=group)
        axes[axis] = (
            dist.get_process_group_ranks(group), mesh.get_local_rank(axis), total.item()
        )  # fmt: skip
    return axes


def every_axis(rank, size):
    meshes = build(ALL)
    check_mesh(meshes.dense)
    data = meshes.dense["dp", "shard"]._flatten("data")
    dist.all_reduce(total := torch.tensor([float(meshes.data_rank)]), group=data.get_group())
    whole = torch.arange(8.0)
    sharded = distribute_tensor(whole, meshes.dense["shard"], [Shard(0)])
    assert sharded.full_tensor().equal(whole)
    assert meshes.dense["dp", "shard"].shape == (2, 2)
    assert (meshes.data_size, total.item()) == (4, 6.0)
    return sums(meshes.dense, rank) | sums(meshes.expert, rank)


@pytest.mark.parametrize("layout", [Layout.two_zones(2, 2), Layout.one_node(8)])
def test_each_axis_reduces_over_its_ranks(layout):
    results = values(run(every_axis, layout))
    expected = {
        axis: {rank: ranks for ranks in groups for rank in ranks}
        for axis, groups in placed_groups(layout).items()
    }
    for rank, axes in enumerate(results):
        for axis, (ranks, at, total) in axes.items():
            assert ranks == list(expected[axis][rank])
            assert (ranks[at], total) == (rank, float(sum(ranks)))


def placed_groups(layout):
    from haiscale.placement import place

    names, zones = zip(*layout.nodes, strict=True)
    return place(Nodes(names, zones, layout.ranks_per_node), ALL).all_groups()


def stages_in_another_order(rank, size):
    """Zones alternate, so that the stages of a pipeline are not in the order of their ranks."""
    mesh = build(Sizes(dp=1, pp=4)).dense
    group = mesh.get_group("pp")
    ranks = dist.get_process_group_ranks(group)
    if (stage := mesh.get_local_rank("pp")) == 0:
        dist.send(torch.tensor([7.0]), group_dst=1, group=group)
    elif stage == 1:
        dist.recv(got := torch.zeros(1), group_src=0, group=group)
        assert got.item() == 7.0
    return ranks


def test_groups_keep_the_order_of_the_stages():
    layout = Layout((("a0", "A"), ("b0", "B"), ("a1", "A"), ("b1", "B")), 1)
    assert values(run(stages_in_another_order, layout)) == [[0, 2, 1, 3]] * 4


def priorities(rank, size):
    import hfreduce.torch

    meshes = build(Sizes(dp=2, tp=2))
    world = hfreduce.torch.communicator()
    groups = {axis: meshes.dense.get_group(axis) for axis in ("dp", "tp", "pp", "shard")}
    assert groups["pp"] is groups["shard"], "axes of one rank share a group"
    backends = {
        axis: groups[axis]._get_backend(torch.device("cpu")) for axis in ("dp", "tp", "shard")
    }
    assert all(backend.communicator is not world for backend in backends.values())
    whole = build(Sizes(dp=4)).dense.get_group("dp")
    assert whole is dist.group.WORLD, "an axis of all ranks needs no other group"
    return {axis: backend.settings.priority for axis, backend in backends.items()}


def test_tensor_parallel_groups_precede_gradients():
    expected = {"dp": "normal", "tp": "high", "shard": "normal"}
    assert values(run(priorities, Layout.one_node(4))) == [expected] * 4


def refused(rank, size):
    """torch's own order of axes puts all nodes of a stage after each other."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pipeline", "dp"))
    names = {"pipeline": "pp"}
    with pytest.raises(LayoutError, match="over 2 pairs of nodes, a0-b0, a1-b1") as raised:
        check_mesh(mesh, names=names)
    assert raised.value.rule is Rule.CROSSING
    check_mesh(mesh, names=names, nodes=Nodes(("a", "b"), ("A", "A"), 4))
    with pytest.raises(ValueError, match="unknown axis 'pipeline'"):
        check_mesh(mesh)
    with pytest.raises(ValueError, match="'x', which is not an axis"):
        check_mesh(mesh, names={"x": "pp"})
    with pytest.raises(ValueError, match="pass mesh_dim_names"):
        check_mesh(init_device_mesh("cpu", (8,)))
    with pytest.raises(LayoutError, match="set dp to 8"):
        build(Sizes(dp=4))
    with pytest.raises(ValueError, match="nodes have 2 ranks, but the default group has 8"):
        build(Sizes(dp=2), nodes=Nodes.one(2))
    dist.all_reduce(total := torch.ones(1))
    return total.item()


def test_a_mesh_that_breaks_a_rule_is_refused_and_the_group_stays_usable():
    assert values(run(refused, Layout.two_zones(2, 2))) == [8.0] * 8


def with_gloo(rank, size):
    meshes = build(ALL)
    return sums(meshes.dense, rank)["pp"][2]


def test_meshes_do_not_need_hfreduce():
    expected = [float(sum(ranks)) for rank in range(8) for ranks in [(rank % 4, rank % 4 + 4)]]
    assert values(run(with_gloo, Layout.one_node(8), backend="gloo")) == expected


def topology(tmp_path, **fields):
    path = tmp_path / "topology.json"
    nodes = [{"name": "a0", "zone": "A"}, {"name": "b0", "zone": "B"}]
    path.write_text(json.dumps({"version": 1, "ranks_per_node": 2, "nodes": nodes} | fields))
    return str(path)


def test_nodes_come_from_the_topology_file(tmp_path):
    path = topology(tmp_path)
    # The file wins over the launcher's variables.
    variables = {"FLYER_TOPOLOGY": path, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert job_nodes(environment=variables) == Nodes(("a0", "b0"), ("A", "B"), 2)
    with pytest.raises(TopologyError, match="2 nodes of 2 ranks are 4, but the job has 8"):
        job_nodes(8, variables)
    with pytest.raises(TopologyError, match="ranks_per_node"):
        job_nodes(4, {"FLYER_TOPOLOGY": topology(tmp_path, ranks_per_node=0)})


def test_without_a_file_nodes_come_from_torchrun():
    torchrun = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "FLYER_ZONE": "B"}
    nodes = job_nodes(environment=torchrun)
    assert (nodes.zones, nodes.ranks_per_node) == (("B", "B"), 8)
    assert job_nodes(environment={}).world_size == 1
    local = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4"}
    assert job_nodes(environment=local).ranks_per_node == 4


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"},
        {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "3"},
        {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "0"},
        {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "²"},
    ],
)
def test_ranks_of_unknown_nodes_are_refused(variables):
    with pytest.raises(SettingError, match="LOCAL_WORLD_SIZE"):
        job_nodes(environment=variables)


def test_importing_the_package_and_the_rules_does_not_import_torch():
    code = "import sys, haiscale, haiscale.mesh, haiscale.placement; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "False\n"

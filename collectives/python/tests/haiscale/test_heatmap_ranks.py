"""Bytes between running ranks: exact numbers of known exchanges, and the picture of the guide."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale.__main__ import main
from haiscale.trace import chrome
from haiscale.trace.record import record
from haiscale.trace.traffic import by_node, by_rank
from hfreduce.group import OPEN
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

TCP = {"HFREDUCE_TRANSPORT": "tcp"}
PICTURE = Path(__file__).parents[4] / "docs/images/heatmap.svg"
MEBIBYTE = 1 << 20


def recorded(layout, function, folder, *arguments):
    """The bytes of two traced steps after one that is not traced."""
    values(run(function, layout, str(folder), *arguments, environment=TCP))
    return by_rank(chrome.read(folder))


def tensor(size_bytes):
    return torch.ones(size_bytes // 4)


def messages(rank, size, folder):
    """In each step rank 1 sends 3 MiB to rank 2 on the other node, and 4 bytes to rank 0."""
    for _ in record(range(3), folder, traced=range(1, 3)):
        for source, destination, length in ((1, 2, 3 * MEBIBYTE), (1, 0, 4)):
            if rank == source:
                dist.send(tensor(length), destination)
            if rank == destination:
                dist.recv(tensor(length), source)


def test_a_message_is_counted_as_its_payload_from_its_source_to_its_destination(tmp_path):
    traffic = recorded(Layout.two_zones(1, 2), messages, tmp_path)
    assert traffic.nodes == ("a0", "a0", "b0", "b0")
    assert traffic.cells == {(1, 2): 2 * 3 * MEBIBYTE, (1, 0): 2 * 4}


def allreduces(rank, size, folder, length):
    for _ in record(range(3), folder, traced=range(1, 3)):
        dist.all_reduce(tensor(length))
    (group,) = OPEN
    return group.communicator.plan()


@pytest.mark.parametrize(("nodes_per_zone", "ranks_per_node"), [(1, 1), (1, 2), (2, 2)])
def test_an_allreduce_sends_its_bytes_up_and_down_each_edge_of_the_trees(
    tmp_path, nodes_per_zone, ranks_per_node
):
    """Each tree has half of the chunks; every edge has their partial sums and their results."""
    layout = Layout.two_zones(nodes_per_zone, ranks_per_node)
    outcomes = run(allreduces, layout, str(tmp_path), 4 * MEBIBYTE, environment=TCP)
    plan = values(outcomes)[0]
    names = [node["name"] for node in plan["nodes"]]
    expected = {}
    for tree in plan["trees"]:
        for node, parent in enumerate(tree["parents"]):
            if parent is not None:
                for edge in ((node, names.index(parent)), (names.index(parent), node)):
                    expected[edge] = expected.get(edge, 0) + 2 * 4 * MEBIBYTE // 2
    ranks = by_rank(chrome.read(tmp_path))
    nodes = by_node(ranks)
    between = {pair: size for pair, size in nodes.cells.items() if not nodes.is_inside(*pair)}
    assert between == expected
    count = 2 * nodes_per_zone
    assert ranks.total(inside=False) == 2 * 2 * (count - 1) * 4 * MEBIBYTE
    # Inside a node each input but the owner's goes to the owner, and each result from it.
    assert ranks.total(inside=True) == 2 * 2 * count * (ranks_per_node - 1) * 4 * MEBIBYTE


def groups(rank, size, folder):
    """Ranks 1 and 3 have a group, in which they are 0 and 1."""
    pair = dist.new_group([1, 3])
    for _ in record(range(3), folder, traced=range(1, 3)):
        if rank in (1, 3):
            dist.all_to_all_single(tensor(4096), tensor(4096), group=pair)


def test_the_ranks_of_a_group_are_those_of_the_job(tmp_path):
    traffic = recorded(Layout.two_zones(1, 2), groups, tmp_path)
    assert traffic.cells == {(1, 3): 2 * 2048, (3, 1): 2 * 2048}


def stages(rank, size, folder):
    """Pipelines over the nodes, an exchange of all ranks, and an allreduce."""
    # On one processor, one rank of each node owns all chunks, whatever machine draws the picture.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    group = dist.new_group(range(size))
    for _ in record(range(3), folder, traced=range(1, 3)):
        if rank < 6:
            dist.send(tensor(3 * MEBIBYTE), rank + 2, group=group)
        if rank > 1:
            dist.recv(tensor(3 * MEBIBYTE), rank - 2, group=group)
        exchanged = 8 * MEBIBYTE
        dist.all_to_all_single(tensor(exchanged), tensor(exchanged), group=group)
        dist.all_reduce(tensor(2 * MEBIBYTE), group=group)


def test_the_picture_of_the_guide_is_current(tmp_path):
    recorded(Layout.two_zones(2, 2), stages, tmp_path)
    drawn = tmp_path / "heatmap.svg"
    assert main(["trace", str(tmp_path), "--heatmap", str(drawn)]) == 0
    assert drawn.read_text() == PICTURE.read_text(), f"copy {drawn} to {PICTURE.parent}"

"""Groups that are split from another group, and groups with equal names."""

import pytest
import torch
import torch.distributed as dist
from hfreduce.compat import IS_BACKEND
from hfreduce.testing import Layout, run, values

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not IS_BACKEND, reason="this torch version cannot split groups"),
]


def split(rank, size):
    """Ranks of the parent, in the given order; a split group can be split again."""
    halves = dist.split_group(None, [[3, 1], [0, 2]])
    members = [3, 1] if rank in (1, 3) else [0, 2]
    assert dist.get_process_group_ranks(halves) == members
    assert dist.get_backend(halves) == "hfreduce"
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor, group=halves)
    assert tensor.eq(sum(members)).all()
    dist.broadcast(tensor := torch.full((3,), float(rank)), members[0], group=halves)
    assert tensor.eq(members[0]).all()
    alone = dist.split_group(halves, [[0], [1]])
    assert alone.size() == 1
    dist.all_reduce(tensor, group=alone)
    assert tensor.eq(members[0]).all()
    if rank < 2:
        part = dist.split_group(None, [[0, 1]])
        dist.all_reduce(total := torch.ones(1), group=part)
        assert total.item() == 2
    else:
        with pytest.raises(ValueError, match=f"rank {rank} is in none of the groups"):
            dist.split_group(None, [[0, 1]])
    for group in (alone, halves):
        dist.destroy_process_group(group)
    dist.all_reduce(total := torch.ones(1))
    return total.item()


@pytest.mark.parametrize("layout", [Layout.one_node(4), Layout.two_zones(1, 2)])
def test_a_group_is_split_by_its_ranks(layout):
    assert values(run(split, layout, deadline_seconds=100.0)) == [4.0] * 4


def same_names(rank, size):
    """Groups that only some ranks create: torch gives both halves of the world the same names."""
    members = [rank % 2, rank % 2 + 2]
    for _ in range(5):
        half = dist.new_group(members)
        alone, _ = dist.new_subgroups(group_size=1, group=half)
        dist.all_reduce(total := torch.full((1000,), float(rank)), group=half)
        assert total.eq(sum(members)).all()
        dist.all_reduce(total, group=alone)
        assert total.eq(sum(members)).all()
        dist.monitored_barrier(half)
        for group in (alone, half):
            dist.destroy_process_group(group)
    return True


def test_groups_of_other_ranks_may_have_the_same_name():
    assert values(run(same_names, Layout.one_node(4), deadline_seconds=100.0)) == [True] * 4

"""haiscale.internals.groups: ranks that have created other groups create one together."""

import pytest
import torch
import torch.distributed as dist
from haiscale.internals.groups import local_group
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch


def unequal(rank, size):
    """Rank 1 is in three groups, ranks 0 and 2 are in two; then there is one of all ranks."""
    groups = [local_group([0, 1]), local_group([1, 0], sort_ranks=False)] if rank < 2 else []
    if rank > 0:
        groups.append(local_group([1, 2]))
    groups.append(dist.new_group())
    totals = []
    for group in groups:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        totals.append(total.item())
    return totals


@pytest.mark.parametrize("backend", ["hfreduce", "gloo"])
def test_ranks_with_different_numbers_of_groups_meet(backend):
    outcomes = run(unequal, Layout.one_node(3), backend=backend, timeout_seconds=20.0)
    assert values(outcomes) == [[1, 1, 3], [1, 1, 3, 3], [3, 3]]

"""haiscale.ddp: models that differ or are invalid, groups of ranks, values that are not numbers."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel, StepError
from hfreduce.testing import Layout, run
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import training
from training import LAYOUT, on_ranks

pytestmark = pytest.mark.torch


def nan(rank, size):
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap("late", model, optimizer)
    for step in range(2):
        loss = training.loss_of(ddp, training.tokens_of(step, rank))
        (loss * float("nan") if rank else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return all(bool(p.isnan().any()) for p in model.parameters())


def test_a_nan_of_one_rank_reaches_all():
    assert on_ranks(nan) == [True, True]


def unaligned(rank, size, which):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if rank == 1 and which == "shape":
        model[1] = nn.Linear(8, 9)
    if rank == 1 and which == "type":
        model[1].bias.data = model[1].bias.data.double()
    if rank == 1 and which == "name":
        model.add_module("2", nn.Linear(2, 2))
    if rank == 1 and which == "trained":
        model[0].bias.requires_grad_(False)
    return DistributedDataParallel(model, bucket_cap_mb=1.0 + (rank == 1 and which == "settings"))


@pytest.mark.parametrize(
    ("which", "name"),
    [("shape", "1.weight"), ("type", "1.bias"), ("name", "2.weight"), ("trained", "0.bias"),
     ("settings", "settings")],
)  # fmt: skip
def test_a_model_that_differs_is_refused_on_every_rank(which, name):
    for outcome in run(unaligned, Layout.one_node(3), which):
        assert outcome.failure is not None
        assert outcome.failure.type == "ModelMismatchError"
        assert f"rank 1 differs from that of rank 0, first at {name!r}" in outcome.failure.text


def without_gradients(rank, size):
    with pytest.raises(ValueError, match="no parameter"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0)
    with pytest.raises(ValueError, match="one device"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    model = nn.Embedding(4, 4, sparse=True)
    ddp = DistributedDataParallel(model)
    with pytest.raises(TypeError, match=r"'weight' is torch.sparse_coo: use dense"):
        ddp(torch.zeros(2, dtype=torch.long)).sum().backward()
    with pytest.raises(StepError, match="did not complete"):
        ddp(torch.zeros(2, dtype=torch.long))


def test_invalid_arguments():
    run_ok = run(without_gradients, LAYOUT)
    assert [outcome.failure for outcome in run_ok] == [None, None]


def subgroups(rank, size):
    """Two groups of two ranks train two models."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(rank)
    model = training.Net()
    optimizer = torch.optim.AdamW(model.parameters())
    ddp = DistributedDataParallel(model, process_group=groups[rank % 2], optimizer=optimizer)
    training.loss_of(ddp, training.tokens_of(0, rank)).backward()
    optimizer.step()
    return training.digest(list(model.parameters()))


def test_ranks_of_a_group_train_together():
    first = on_ranks(subgroups, layout=Layout.one_node(4))
    assert first[0] == first[2] != first[1] == first[3]

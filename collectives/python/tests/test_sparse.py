"""Allreduce of sparse tensors, as gradients of embeddings are."""

import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run, values
from torch import nn

pytestmark = pytest.mark.torch

LAYOUT = Layout.two_zones(1, 2)


def tensor_of(rank, dtype, dense_dims):
    """As many entries as the rank's number; some indices repeat, some are shared by all ranks."""
    random = torch.Generator().manual_seed(rank)
    places = torch.randint(0, 6, (2, rank), generator=random)
    shape = (6, 6, *([3] * dense_dims))
    numbers = torch.randint(-4, 5, (rank, *shape[2:]), generator=random).to(dtype)
    return torch.sparse_coo_tensor(places, numbers, shape)


def sums(rank, size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for dense_dims in (0, 1):
            tensor = tensor_of(rank, dtype, dense_dims)
            dist.all_reduce(tensor)
            expected = sum(tensor_of(each, dtype, dense_dims).to_dense() for each in range(size))
            assert torch.equal(tensor.to_dense(), expected), (dtype, dense_dims)
    empty = torch.sparse_coo_tensor(size=(4,))
    work = dist.all_reduce(empty, async_op=True)
    work.wait()
    assert empty.to_dense().eq(0).all()
    return True


def test_sums_equal_those_of_dense_tensors():
    values(run(sums, LAYOUT))


def differ(rank, size):
    errors = []
    for shape in ((4, 4), (4,)):
        own = torch.zeros(shape if rank == 2 else (5, 5)).to_sparse()
        with pytest.raises(ValueError, match="rank 2 has a different shape from rank 0") as excinfo:
            dist.all_reduce(own)
        errors.append(str(excinfo.value))
    # The group works after that.
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(size).all()
    return errors


def test_different_shapes_are_refused_on_all_ranks():
    first, *rest = values(run(differ, LAYOUT))
    assert all(other == first for other in rest)
    assert "[2, 4, 4] and [2, 5, 5]" in first[0]


def train(rank, size):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(20, 4, mode="sum", sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        words = torch.tensor([[rank, step, 19]])
        optimizer.zero_grad()
        model(words).square().sum().backward()
        optimizer.step()
    return model.module.weight.detach().tolist()


def test_ddp_trains_sparse_embeddings_as_it_does_over_gloo():
    hfreduce_values = values(run(train, LAYOUT))
    gloo = values(run(train, LAYOUT, backend="gloo"))
    assert all(weights == hfreduce_values[0] for weights in hfreduce_values)
    torch.testing.assert_close(torch.tensor(hfreduce_values[0]), torch.tensor(gloo[0]))

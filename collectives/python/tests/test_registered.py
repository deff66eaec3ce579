"""Arrays and tensors in registered memory: the same results, in place."""

import gc

import hfreduce.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hfreduce._native import Settings
from hfreduce.compat import IS_BACKEND
from hfreduce.testing import Layout, run

pytestmark = pytest.mark.torch


def sums_in_place(rank, size):
    """Registered arrays of numpy and torch, on some ranks and on all."""
    group = hfreduce.torch.communicator()
    total = sum(range(1, size + 1))
    array = hfreduce.empty((300, 1000), "float32", group)
    assert array.shape == (300, 1000)
    assert not array.any()
    array += rank + 1
    hfreduce.allreduce(array, group)
    assert (array == total).all()
    assert hfreduce.torch.stats()["in_place_bytes"] == array.nbytes
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.float8_e5m2, torch.uint8):
        make = hfreduce.torch.empty if rank % 2 else torch.zeros
        tensor = make(70, 1000, dtype=dtype)
        assert tensor.shape == (70, 1000)
        assert tensor.dtype == dtype
        tensor.copy_(torch.ones(70, 1000))
        dist.all_reduce(tensor[:])
        assert tensor.double().eq(size).all(), dtype
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu")) if IS_BACKEND else group
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    flat = backend.allocate_tensor(5000, dtype=torch.float64, device=torch.device("cpu"))
    dist.all_reduce(flat)
    assert flat.shape == (5000,)
    with pytest.raises(ValueError, match="CPU"):
        backend.allocate_tensor(1, dtype=torch.float32, device=torch.device("cuda"))
    before = hfreduce.torch.stats()["registered_bytes"]
    del flat, tensor, array
    gc.collect()
    assert hfreduce.torch.stats()["registered_bytes"] < before
    return True


def test_registered_tensors_are_summed_in_place():
    outcomes = run(sums_in_place, Layout.one_node(3))
    assert [outcome.value for outcome in outcomes] == [True] * 3, outcomes


def refusals(rank, size):
    """Invalid allocations, and allocations without elements."""
    group = hfreduce.torch.communicator()
    with pytest.raises(TypeError, match="objects"):
        hfreduce.empty(3, object, group)
    with pytest.raises(ValueError, match="sizes"):
        hfreduce.empty((2, -1), "float32", group)
    with pytest.raises(ValueError, match="shared memory"):
        hfreduce.empty(1 << 60, "uint8", group)
    assert hfreduce.empty((0, 3), np.int8, group).shape == (0, 3)
    assert hfreduce.torch.empty(0, 4).shape == (0, 4)
    buffer = hfreduce.torch.empty(10)
    dist.destroy_process_group()
    buffer += 1  # it outlives its group
    return float(buffer.sum())


def test_invalid_allocations_are_refused_and_memory_outlives_its_group():
    outcomes = run(refusals, Layout.one_node(2))
    assert [outcome.value for outcome in outcomes] == [10.0] * 2, outcomes


def test_the_limit_is_a_number():
    assert Settings.read({"HFREDUCE_REGISTERED_BYTES": "0"}).registered_bytes == 0
    assert Settings.read({"HFREDUCE_REGISTERED_BYTES": "65536"}).registered_bytes == 65536
    with pytest.raises(hfreduce.SettingError, match="HFREDUCE_REGISTERED_BYTES"):
        Settings.read({"HFREDUCE_REGISTERED_BYTES": "much"})

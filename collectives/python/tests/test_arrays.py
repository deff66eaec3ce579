"""Arrays of other libraries, through the buffer protocol and DLPack, and what is refused."""

import array
import math

import hfreduce.torch
import numpy as np
import pytest
import torch
from hfreduce import _native
from hfreduce.arrays import memory
from hfreduce.testing import Layout, run

pytestmark = pytest.mark.torch


class Exported:
    """An object that has DLPack only, and perhaps an old one."""

    def __init__(self, tensor, *, versioned=True):
        self.tensor, self.versioned = tensor, versioned

    def __dlpack__(self, **keywords):
        if keywords and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**keywords)


def reduce_everything(rank, size):
    """One of each kind, in place."""
    group = hfreduce.torch.communicator()
    expected = [sum(range(1, size + 1))] * 5
    for dtype in (np.float32, np.float64, np.float16, np.int16, np.uint64, np.int8):
        numbers = np.full((5,), rank + 1, dtype=dtype)
        hfreduce.allreduce(numbers, group)
        assert numbers.tolist() == expected, dtype
    plain = array.array("d", [rank + 1.0] * 5)
    hfreduce.allreduce(plain, group, op="max")
    assert plain.tolist() == [size] * 5
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn, torch.int64):
        tensor = torch.full((5,), rank + 1.0).to(dtype)
        hfreduce.allreduce(tensor, group)
        assert tensor.double().tolist() == expected, dtype
    old = torch.full((5,), float(rank))
    hfreduce.allreduce(Exported(old, versioned=False), group, op="avg", timeout_seconds=30.0)
    assert old.tolist() == [(size - 1) / 2] * 5
    hfreduce.allreduce(np.empty((0, 3), np.float32), group)
    hfreduce.allreduce(torch.empty(0), group)
    whole = np.full((4, 6), float(rank))
    hfreduce.allreduce(whole[1:3], group)
    assert whole[1:3].flatten().tolist() == [math.comb(size, 2)] * 12
    assert whole[0].tolist() == [rank] * 6
    return True


def test_arrays_of_all_kinds_are_reduced_in_place():
    outcomes = run(reduce_everything, Layout.one_node(3))
    assert [outcome.value for outcome in outcomes] == [True] * 3, outcomes


def test_memory_is_the_arrays_own():
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = memory(numbers)
    assert found[:3] == (numbers.ctypes.data, 6, _native.FLOAT32)
    tensor = torch.arange(6, dtype=torch.bfloat16)[2:]
    assert memory(tensor)[:3] == (tensor.data_ptr(), 4, _native.BFLOAT16)
    assert memory(bytearray(b"abc"))[1:3] == (3, _native.UINT8)


def frozen():
    numbers = np.ones(3)
    numbers.flags.writeable = False
    return numbers


REFUSED = {
    "read-only": (frozen, ValueError, "read-only memory cannot take the result"),
    "bytes": (lambda: b"abc", ValueError, "read-only memory"),
    "strided": (lambda: np.ones(10)[::2], ValueError, "not contiguous"),
    "transposed": (lambda: torch.ones(2, 3).t(), ValueError, "not contiguous"),
    "expanded": (lambda: torch.ones(1).expand(4), ValueError, "not contiguous"),
    "complex": (lambda: np.ones(3, np.complex64), TypeError, "cannot reduce elements of"),
    "complex tensor": (lambda: torch.ones(3, dtype=torch.complex64), TypeError, "DLPack type 5"),
    "objects": (lambda: np.array([None]), TypeError, "cannot reduce elements of"),
    "big-endian": (lambda: np.ones(3, ">f4"), TypeError, "cannot reduce elements of"),
    "list": (lambda: [1.0], TypeError, "neither the buffer protocol nor DLPack"),
}


@pytest.mark.parametrize(("make", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_reduced_in_place_is_refused_with_the_reason(make, error, text):
    with pytest.raises(error, match=text):
        memory(make())

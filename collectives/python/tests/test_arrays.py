"""Arrays of other libraries, through the buffer protocol and DLPack, and refused ones."""

import array
import ctypes
import math
import time

import hfreduce.torch
import numpy as np
import pytest
import torch
from hfreduce import _native
from hfreduce.arrays import gpu_memory, memory
from hfreduce.lifetime import is_held
from hfreduce.testing import Layout, run

pytestmark = pytest.mark.torch


class Exported:
    """An object with DLPack only, perhaps in an old version."""

    def __init__(self, tensor, *, versioned=True):
        self.tensor, self.versioned = tensor, versioned

    def __dlpack__(self, **keywords):
        if keywords and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**keywords)


def reduce_everything(rank, size):
    """Reduces one array of each kind in place."""
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


def reduce_many(rank, size):
    """Reduces pieces as one operation, with and without a wait; elements between them are kept."""
    group = hfreduce.torch.communicator()
    flat = np.full(1_000, 7.0, np.float32)
    pieces = [flat[start : start + 3] for start in range(0, 1_000, 5)]
    for piece in pieces:
        piece[...] = rank
    hfreduce.allreduce_many(pieces, group)
    assert {piece.tolist() == [math.comb(size, 2)] * 3 for piece in pieces} == {True}
    assert {flat[index] for index in range(1_000) if index % 5 >= 3} == {7.0}
    first, second = np.full(4, rank), np.full(100_000, rank)
    pending = [hfreduce.start_allreduce([each], group, op="max") for each in (first, second)]
    for each in pending:
        each.wait()
        assert each.done()
    assert (first == size - 1).all()
    assert (second == size - 1).all()
    # Memory of an operation without a waiter is kept until the operation ends.
    hfreduce.start_allreduce([np.full(1_000_000, float(rank))], group)
    hfreduce.allreduce(first, group)
    until = time.monotonic() + 60
    while is_held():
        assert time.monotonic() < until, "memory is still held after 60 s"
        time.sleep(0.01)
    return True


def test_many_arrays_are_one_operation():
    outcomes = run(reduce_many, Layout.one_node(3))
    assert [outcome.value for outcome in outcomes] == [True] * 3, outcomes


def reduce_a_million(rank, size):
    """Reduces more tensors than a model has in one operation."""
    group = hfreduce.torch.communicator()
    numbers = np.arange(2_000_000, dtype=np.float32) % 1_000
    expected = numbers.copy()
    expected[::2] *= size
    start = numbers.ctypes.data
    pieces = [(start + 8 * index, 1) for index in range(1_000_000)]
    group.allreduce_many(pieces, _native.FLOAT32, _native.SUM, 300.0).wait()
    assert np.array_equal(numbers, expected)
    return True


@pytest.mark.slow
def test_a_million_tensors_of_one_element_are_summed_without_the_elements_between():
    outcomes = run(reduce_a_million, Layout.one_node(2), deadline_seconds=400.0)
    assert [outcome.value for outcome in outcomes] == [True] * 2, outcomes


class Immutable(Exported):
    """Like an array of JAX: read-only, of a library whose arrays are immutable."""

    __module__ = "jaxlib.xla_extension"


def reduce_to_another_array(rank, size):
    """Reduces immutable arrays to `out`; the input does not change."""
    group = hfreduce.torch.communicator()
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((2, 3), rank + 1.0).to(dtype)
        with pytest.raises(ValueError, match="are immutable: pass `out`"):
            hfreduce.allreduce(Immutable(tensor), group)
        result = torch.zeros(6, dtype=dtype)
        hfreduce.allreduce(Immutable(tensor), group, out=result)
        assert result.tolist() == [sum(range(1, size + 1))] * 6
        assert tensor.tolist() == [[rank + 1.0] * 3] * 2
    numbers = np.full((3, 2), rank)
    numbers.flags.writeable = False
    result = np.zeros((3, 2), numbers.dtype)
    hfreduce.allreduce(numbers, group, out=result)
    assert result.tolist() == [[math.comb(size, 2)] * 2] * 3
    single = np.zeros((), np.float64)
    hfreduce.allreduce(np.float64(rank), group, out=single)
    assert single == math.comb(size, 2)
    foreign = (ctypes.c_double * 2)(rank, 1.0)
    pair = np.zeros(2)
    hfreduce.allreduce(memoryview(foreign).toreadonly(), group, out=pair)
    assert pair.tolist() == [math.comb(size, 2), size]
    for wrong in (np.zeros(5, numbers.dtype), np.zeros(6, np.float32)):
        with pytest.raises(ValueError, match="out: must have the 6 elements"):
            hfreduce.allreduce(numbers, group, out=wrong)
    with pytest.raises(ValueError, match="read-only memory cannot take the result"):
        hfreduce.allreduce(np.ones(6), group, out=frozen())
    return True


def test_an_immutable_array_is_reduced_to_another():
    outcomes = run(reduce_to_another_array, Layout.one_node(2))
    assert [outcome.value for outcome in outcomes] == [True] * 2, outcomes


def test_an_immutable_gpu_array_is_not_written():
    class OnGpu:
        __module__ = "jax"
        __cuda_array_interface__ = {  # noqa: RUF012 # read, never written
            "shape": (1,), "typestr": "<f4", "data": (4096, False), "version": 3
        }  # fmt: skip

    with pytest.raises(ValueError, match="OnGpu: arrays of this library are immutable"):
        gpu_memory(OnGpu(), None)
    with pytest.raises(ValueError, match="out: OnGpu is in GPU memory: pass a copy"):
        hfreduce.allreduce(OnGpu(), None, out=np.zeros(1, np.float32))


def test_arrays_of_two_types_cannot_be_one_operation():
    for several in ([np.ones(2), np.ones(2, np.float32)], []):
        with pytest.raises(
            ValueError, match="arrays: expected at least one array, all of one type"
        ):
            hfreduce.start_allreduce(several, None)


def test_arrays_of_all_kinds_are_reduced_in_place():
    outcomes = run(reduce_everything, Layout.one_node(3))
    assert [outcome.value for outcome in outcomes] == [True] * 3, outcomes


def test_the_memory_of_the_array_is_used():
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    description = memory(numbers)
    assert description[:3] == (numbers.ctypes.data, 6, _native.FLOAT32)
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
def test_arrays_that_cannot_be_reduced_in_place_are_refused_with_the_reason(make, error, text):
    with pytest.raises(error, match=text):
        memory(make())

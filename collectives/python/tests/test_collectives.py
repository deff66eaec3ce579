"""Every collective of torch, over shared memory and over TCP, compared with plain arithmetic."""

import gc
import warnings
from datetime import timedelta

import hfreduce.torch
import pytest
import torch
import torch.distributed as dist
from hfreduce.compat import IS_BACKEND
from hfreduce.group import OPEN
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

LAYOUTS = {
    "one-node": Layout.one_node(4),
    "two-zones": Layout.two_zones(1, 2),
    "uneven-zones": Layout((("a0", "A"), ("a1", "A"), ("b0", "B")), 1),
    "three-zones": Layout((("a0", "A"), ("b0", "B"), ("c0", "C")), 1),
    "mixed-order": Layout((("a0", "A"), ("b0", "B"), ("a1", "A"), ("b1", "B")), 1),
    "alone": Layout.one_node(1),
}


def content(rank, numel, dtype=torch.float32):
    """Small whole numbers: sums are exact in every type and order."""
    return ((torch.arange(numel) * 7 + rank * 3) % 5).to(dtype)


def reductions(rank, size):
    """All types, operations and lengths, including empty and odd ones."""
    ranks = range(size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32,
                  torch.int64, torch.uint8, torch.int8):  # fmt: skip
        for numel in (0, 3, 1000, 70_001):
            stack = torch.stack([content(r, numel, dtype) for r in ranks])
            expected = {
                dist.ReduceOp.SUM: stack.sum(0, dtype=dtype),
                dist.ReduceOp.MIN: stack.amin(0),
                dist.ReduceOp.MAX: stack.amax(0),
            }
            for op, result in expected.items():
                tensor = content(rank, numel, dtype)
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor, result), (dtype, numel, op)
    bits = content(rank, 100, torch.int64)
    dist.all_reduce(bits, dist.ReduceOp.BXOR)
    expected_bits = content(0, 100, torch.int64)
    for other in range(1, size):
        expected_bits ^= content(other, 100, torch.int64)
    assert torch.equal(bits, expected_bits)
    product = torch.full((9,), 2.0)
    dist.all_reduce(product, dist.ReduceOp.PRODUCT)
    assert product.eq(2.0**size).all()
    average = torch.full((9,), float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.eq((size - 1) / 2).all()
    truth = torch.tensor([rank == 0, False, True])
    dist.all_reduce(truth)
    assert truth.tolist() == [True, False, True]
    complex_sum = torch.full((3,), complex(rank, 1))
    dist.all_reduce(complex_sum)
    assert complex_sum.eq(complex(sum(ranks), size)).all()
    root = size - 1
    tensor = content(rank, 1000)
    dist.reduce(tensor, root)
    total = sum(content(r, 1000) for r in ranks)
    assert torch.equal(tensor, total if rank == root else content(rank, 1000))
    scattered = torch.empty(11)
    dist.reduce_scatter_tensor(scattered, content(rank, 11 * size))
    whole = sum(content(r, 11 * size) for r in ranks)
    assert torch.equal(scattered, whole[rank * 11 : rank * 11 + 11])
    pieces = [content(rank + piece, 6) for piece in ranks]
    output = torch.empty(6)
    dist.reduce_scatter(output, pieces)
    assert torch.equal(output, sum(content(r + rank, 6) for r in ranks))
    return True


def movements(rank, size):
    """Operations that only move data, also of types that cannot be summed."""
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2):
        for numel in (0, 5, 70_001):
            own = content(rank, numel, dtype)
            for root in {0, size - 1}:
                tensor = own.clone()
                dist.broadcast(tensor, root)
                same(tensor, content(root, numel, dtype))
            gathered = torch.empty(size * numel, dtype=dtype)
            dist.all_gather_into_tensor(gathered, own)
            for other in range(size):
                same(gathered[other * numel : (other + 1) * numel], content(other, numel, dtype))
            parts = [torch.empty(numel, dtype=dtype) for _ in range(size)]
            dist.all_gather(parts, own)
            for other in range(size):
                same(parts[other], content(other, numel, dtype))
    parts = [torch.empty(7) for _ in range(size)] if rank == 0 else None
    dist.gather(content(rank, 7), parts, dst=0)
    assert parts is None or all(torch.equal(p, content(r, 7)) for r, p in enumerate(parts))
    output = torch.empty(7)
    dist.scatter(output, [content(r, 7) for r in range(size)] if rank == 0 else None, src=0)
    assert torch.equal(output, content(rank, 7))
    output = torch.empty(2 * size, 3)
    dist.all_to_all_single(output, content(rank, 6 * size).view(2 * size, 3))
    for other in range(size):
        expected = content(other, 6 * size).view(2 * size, 3)[2 * rank : 2 * rank + 2]
        assert torch.equal(output[2 * other : 2 * other + 2], expected)
    # Uneven: rank r sends i + 1 elements to rank i.
    inputs = [torch.full((i + 1,), float(rank * 10 + i)) for i in range(size)]
    received = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(received, inputs)
    assert all(part.eq(other * 10 + rank).all() for other, part in enumerate(received))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.barrier()
    if IS_BACKEND:  # older versions of torch support it only for Gloo
        dist.monitored_barrier(timeout=timedelta(seconds=10))
    return True


def same(tensor, expected):
    """Equality that also works for types without it."""
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def messages(rank, size):
    """Around the ring, with tags out of order, and in both directions concurrently."""
    after, before = (rank + 1) % size, (rank - 1) % size
    outgoing = [content(rank * 2 + tag, 1000) for tag in range(2)]
    incoming = [torch.empty(1000) for _ in range(2)]
    works = [dist.isend(outgoing[tag], after, tag=tag) for tag in (1, 0)]
    works += [dist.irecv(incoming[tag], before, tag=tag) for tag in (0, 1)]
    for work in works:
        work.wait()
    assert all(torch.equal(incoming[tag], content(before * 2 + tag, 1000)) for tag in range(2))
    landing = torch.empty(10)
    pair = [
        dist.P2POp(dist.isend, content(rank, 10), after),
        dist.P2POp(dist.irecv, landing, before),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert torch.equal(landing, content(before, 10))
    return True


def overlapping(rank, size):
    """Many concurrent operations: waits in another order, waits for futures, and no waits."""
    tensors = [content(rank + i, 500 + i) for i in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works[::2]):
        work.wait()
    for work in works[1::2]:
        work.get_future().wait()
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, sum(content(r + i, 500 + i) for r in range(size)))
    for _ in range(50):
        dist.all_reduce(torch.ones(1000), async_op=True)
    tensors = [content(rank, 10), content(rank, 3, torch.int64), content(rank, 0)]
    warnings.simplefilter("ignore", FutureWarning)
    dist.all_reduce_coalesced(tensors[:1] + tensors[2:])
    assert torch.equal(tensors[0], sum(content(r, 10) for r in range(size)))
    return True


def groups(rank, size):
    """Sub-groups, also with ranks in another order than the world's."""
    evens = dist.new_group(list(range(0, size, 2)))
    odds = dist.new_group(list(range(1, size, 2)))
    own = odds if rank % 2 else evens
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=own)
    assert tensor.item() == sum(range(rank % 2, size, 2))
    dist.destroy_process_group(own)
    return hfreduce.torch.plan()["crossings"], sorted(hfreduce.torch.stats())


def wrapped(rank, size):
    """torch's debug wrapper keeps only the C++ part of a backend."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(list(range(size)))
    gc.collect()
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    gathered = [None] * size
    dist.all_gather_object(gathered, rank, group=group)
    dist.destroy_process_group(group)
    return tensor.tolist(), gathered, len(OPEN)


CASES = [
    (function, name)
    for function in (reductions, movements, messages, overlapping)
    for name, layout in LAYOUTS.items()
    if layout.world_size > 1 or function is not messages  # one rank has no peer
]


@pytest.mark.parametrize(
    ("function", "name"), CASES, ids=[f"{function.__name__}-{name}" for function, name in CASES]
)
def test_collectives(function, name):
    layout = LAYOUTS[name]
    assert values(run(function, layout)) == [True] * layout.world_size


def test_sub_groups_and_the_plan():
    results = values(run(groups, LAYOUTS["two-zones"]))
    assert {tuple(crossings) for crossings, _ in results} == {(1, 1)}


@pytest.mark.skipif(not IS_BACKEND, reason="older versions of torch wrap only backends")
def test_a_group_in_torchs_debug_wrapper_works_until_it_is_destroyed():
    results = values(run(wrapped, LAYOUTS["two-zones"]))
    assert results == [([4.0] * 4, [0, 1, 2, 3], 1)] * 4


def special(rank, size):
    """Rank 1 has the special values."""
    ones = [1.0, 1.0, 1.0, 1.0, 1.0]
    odd = [float("nan"), float("inf"), float("-inf"), 1e-42, -0.0]
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.tensor(odd if rank == 1 else ones, dtype=dtype)
        dist.all_reduce(tensor)
        results[str(dtype)] = tensor.tolist()
        tensor = torch.tensor([float("nan") if rank == 1 else 1.0], dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        results[f"{dtype} max"] = tensor.tolist()
        tensor = torch.tensor([float("inf") if rank % 2 else float("-inf")], dtype=dtype)
        dist.all_reduce(tensor)
        results[f"{dtype} inf - inf"] = tensor.tolist()
    return repr(results), size


def test_nan_and_infinity_arrive_on_every_rank():
    results = values(run(special, Layout.two_zones(1, 2)))
    assert len(set(results)) == 1
    text = results[0][0]
    assert "'torch.float32': [nan, inf, -inf, 3.0, 3.0]" in text
    assert text.count("max': [nan]") == 2
    assert text.count("inf - inf': [nan]") == 2


def root_options(kind, root):
    """Options as a caller of the group passes them: torch's functions would check the root."""
    options = kind()
    options.rootRank = root
    return options


def refusals(rank, size):
    """Calls that are refused before any data is sent, with their errors."""
    world = dist.group.WORLD
    base = torch.arange(16.0).view(4, 4)
    # Several elements share one location, so a written result would not fit each of them.
    expanded = base[0, :1].expand(8)
    whole = torch.zeros(8 * size)
    windows = torch.zeros(20).as_strided((4, 8), (4, 1))
    attempts = {
        "expanded": lambda: dist.all_reduce(expanded),
        "windows": lambda: dist.all_reduce(windows),
        "expanded broadcast": lambda: dist.broadcast(expanded, 0),
        "received": lambda: dist.recv(expanded, (rank + 1) % size),
        "gathered": lambda: dist.all_gather_into_tensor(whole[:1].expand(8 * size), whole[:8]),
        "shared": lambda: dist.reduce_scatter_tensor(expanded, whole),
        "sparse": lambda: dist.all_reduce(base.to_sparse(), dist.ReduceOp.MAX),
        "fnuz": lambda: dist.all_reduce(torch.zeros(3).to(torch.float8_e4m3fnuz)),
        "bits of floats": lambda: dist.all_reduce(base, dist.ReduceOp.BXOR),
        "average of ints": lambda: dist.all_reduce(
            torch.zeros(3, dtype=torch.int64), dist.ReduceOp.AVG
        ),
        "average of booleans": lambda: dist.all_reduce(
            torch.zeros(3, dtype=torch.bool), dist.ReduceOp.AVG
        ),
        "premul": lambda: dist.all_reduce(
            torch.zeros(3, dtype=torch.int64), dist._make_nccl_premul_sum(2.0)
        ),
        "gather sizes": lambda: dist.all_gather([torch.zeros(i + 1) for i in range(size)], base),
        "output size": lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(3)),
        "root below": lambda: world.broadcast([base], root_options(dist.BroadcastOptions, -1)),
        "root above": lambda: world.reduce([base], root_options(dist.ReduceOptions, size)),
        "no list": lambda: world.gather([], [base], root_options(dist.GatherOptions, rank)),
        "two lists": lambda: world.allgather([[base] * size] * 2, [base]),
        "splits": lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [1, 1]),
    }
    texts = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (ValueError, TypeError, RuntimeError) as error:
            texts[name] = f"{type(error).__name__}: {error}"
        else:
            texts[name] = "accepted"
    assert base.tolist() == torch.arange(16.0).view(4, 4).tolist()
    # The group works after all of that.
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(size).all()
    return texts


def test_invalid_calls_are_refused_and_the_group_continues():
    texts = values(run(refusals, Layout.two_zones(1, 2)))[0]
    assert not [name for name, text in texts.items() if text == "accepted"]
    assert "share memory (strides (0,))" in texts["expanded"]
    assert "cannot reduce torch.float8_e4m3fnuz" in texts["fnuz"]
    assert "PREMUL_SUM needs a floating-point type" in texts["premul"]
    assert "torch.int64: sum, and divide by the number of ranks" in texts["average of ints"]
    assert "torch.bool: sum, and divide" in texts["average of booleans"]
    assert "broadcast: invalid root rank -1: expected 0 to 3" in texts["root below"]
    assert "reduce: invalid root rank 4" in texts["root above"]
    assert "gather: takes one list with a tensor of each rank, not 0 lists" in texts["no list"]
    assert "all_gather: takes one list with a tensor of each rank, not 2" in texts["two lists"]

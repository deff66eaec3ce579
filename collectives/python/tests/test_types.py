"""Every type that can be reduced, compared with torch's arithmetic and with Gloo."""

import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32,
            torch.int64, torch.uint64)  # fmt: skip
OPERATIONS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def same(actual, expected, description):
    """Equal numbers, and NaN in the same positions; zeros may differ in sign."""
    actual, expected = actual.double(), expected.double()
    equal = actual.eq(expected) | (actual.isnan() & expected.isnan())
    assert equal.all(), (description, actual[~equal][:4], expected[~equal][:4])


def pairs_of_bytes(rank, size):
    """All 256 x 256 pairs of both 8-bit formats: torch computes in fp32 and rounds by its cast."""
    pattern = torch.arange(65_536)
    halves = [(pattern >> 8).to(torch.uint8), (pattern & 255).to(torch.uint8)]
    for dtype in FP8:
        first, second = (half.view(dtype).float() for half in halves)
        expected = {
            dist.ReduceOp.SUM: first + second,
            dist.ReduceOp.PRODUCT: first * second,
            dist.ReduceOp.MIN: torch.minimum(first, second),
            dist.ReduceOp.MAX: torch.maximum(first, second),
            dist.ReduceOp.AVG: (first + second) / size,
        }
        for op, result in expected.items():
            tensor = halves[rank].clone().view(dtype)
            dist.all_reduce(tensor, op)
            same(tensor.float(), result.to(dtype).float(), (dtype, op))
    return True


def patterns_of_16_bits(rank, size):
    """Every pattern with every 257th as its partner."""
    own = torch.arange(65_536, dtype=torch.int32)
    if rank == 1:
        own = own * 257 % 65_536
    numbers = [torch.arange(65_536, dtype=torch.int32)] * 2
    numbers[1] = numbers[0] * 257 % 65_536
    for dtype in (torch.bfloat16, torch.float16):
        first, second = (n.to(torch.uint16).view(dtype).float() for n in numbers)
        for op, result in {
            dist.ReduceOp.SUM: first + second,
            dist.ReduceOp.PRODUCT: first * second,
            dist.ReduceOp.AVG: (first + second) / size,
            dist.ReduceOp.MAX: torch.maximum(first, second),
        }.items():
            tensor = own.to(torch.uint16).view(dtype).clone()
            dist.all_reduce(tensor, op)
            same(tensor, result.to(dtype), (dtype, op))
    return True


def integers(rank, size):
    """Wrapping sums and products, and the ends of each type's range."""
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        ends = [limits.min, limits.max, 0, 1, 2, limits.max - rank, limits.min + rank]
        tensor = torch.tensor(ends, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert tensor.tolist() == [*ends[:5], limits.max, limits.min + size - 1], dtype
        tensor = torch.tensor(ends, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        assert tensor.tolist() == [*ends[:5], limits.max - size + 1, limits.min], dtype
        tensor = torch.tensor(ends, dtype=dtype)
        dist.all_reduce(tensor)
        totals = [*(size * end for end in ends[:5])]
        totals += [
            sum(limits.max - r for r in range(size)),
            sum(limits.min + r for r in range(size)),
        ]
        span = 1 << limits.bits
        wrapped = [(total - limits.min) % span + limits.min for total in totals]
        assert tensor.tolist() == wrapped, dtype
    return True


def compared_with_gloo(rank, size):
    """Runs the same calls with Gloo, for the types that it supports."""
    gloo = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32,
                  torch.int64, torch.uint8, torch.int8):  # fmt: skip
        for op in OPERATIONS:
            if dtype.is_floating_point:
                tensor = torch.randn(3001, generator=generator).to(dtype)
            else:
                tensor = torch.randint(0, 4, (3001,), generator=generator, dtype=dtype)
            other = tensor.clone()
            dist.all_reduce(tensor, op)
            dist.all_reduce(other, op, group=gloo)
            # Gloo rounds short types after every step, so their last digits may differ.
            steps = {torch.bfloat16: 0.03, torch.float16: 0.004}.get(dtype)
            limits = {} if steps is None else {"rtol": steps, "atol": steps}
            torch.testing.assert_close(tensor, other, **limits)
    return size


def large_averages(rank, size):
    """The type cannot represent the sum, but the average."""
    tensor = torch.full((1000,), 60_000.0, dtype=torch.float16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.eq(60_000).all(), tensor[:3]
    eights = torch.full((1000,), 448.0).to(torch.float8_e4m3fn)
    dist.all_reduce(eights, dist.ReduceOp.AVG)
    assert eights.float().eq(448).all()
    return rank < size


def flushed_subnormals(rank, size):
    """A thread that flushes subnormals gets the same results as one that does not."""
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    inputs = {
        # Patterns of subnormals: 1 to 7 times the smallest number.
        dtype: torch.arange(1, 8, dtype=getattr(torch, f"int{8 * dtype.itemsize}")).view(dtype)
        for dtype in types
    }
    results = []
    for flush in (False, True):
        assert torch.set_flush_denormal(flush), "this processor cannot flush subnormals"
        for dtype in types:
            for elements in (7, 7 << 16):
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                    tensor = inputs[dtype].repeat(elements // 7)
                    work = dist.all_reduce(tensor, op, async_op=elements > 7)
                    if work is not None:
                        work.wait()
                    results.append((flush, dtype, op, tensor))
    torch.set_flush_denormal(False)
    half = len(results) // 2
    for (_, dtype, op, usual), (_, _, _, flushed) in zip(
        results[:half], results[half:], strict=True
    ):
        patterns = usual.view(torch.uint8)
        assert patterns.any(), (dtype, op)
        assert patterns.equal(flushed.view(torch.uint8)), (dtype, op, rank)
    return size


@pytest.mark.parametrize(
    ("function", "ranks"),
    [(pairs_of_bytes, 2), (patterns_of_16_bits, 2), (integers, 3), (compared_with_gloo, 3),
     (large_averages, 4)],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_types(function, ranks):
    assert all(values(run(function, Layout.one_node(ranks))))


def test_integers_between_zones():
    assert all(values(run(integers, Layout.two_zones(1, 2))))


@pytest.mark.parametrize("layout", [Layout.one_node(2), Layout.two_zones(1, 2)], ids=["shm", "tcp"])
def test_subnormals_are_kept_if_the_calling_thread_flushes_them(layout):
    assert all(values(run(flushed_subnormals, layout)))

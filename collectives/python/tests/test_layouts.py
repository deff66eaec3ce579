"""Tensors that are not contiguous, pieces of different sizes, and sums with factors."""

import pytest
import torch
import torch.distributed as dist
from hfreduce import CollectiveError
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

ONE_NODE, TWO_NODES = Layout.one_node(3), Layout.two_zones(1, 2)
LAYOUTS = pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES], ids=["one-node", "two-nodes"])


def content(rank, shape=(2, 3, 4, 5)):
    return (torch.arange(torch.Size(shape).numel()) * 7 % 5 + rank).float().view(shape)


FORMS = {
    "contiguous": lambda t: t.clone(),
    "channels_last": lambda t: t.clone(memory_format=torch.channels_last),
    "transposed": lambda t: t.clone().transpose(0, 3).contiguous().transpose(0, 3),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}


def forms(rank, size):
    """Each collective over each form, and with another form on every rank: in logical order."""
    ranks = range(size)
    total = sum(content(r) for r in ranks)
    cases = [*[[form] * size for form in FORMS.values()]]
    cases.append([list(FORMS.values())[r % len(FORMS)] for r in ranks])
    for case in cases:
        form = case[rank]
        tensor = form(content(rank))
        has_gaps = tensor.untyped_storage().nbytes() // 4 == 2 * tensor.numel()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)
        if has_gaps:
            # Memory between the elements does not belong to the tensor.
            between = tensor.as_strided(tensor.shape, tensor.stride(), 1)
            assert torch.equal(between, content(rank))
        dist.all_reduce_coalesced([first := form(content(rank)), second := content(rank)])
        assert torch.equal(first, total)
        assert torch.equal(second, total)
        dist.broadcast(tensor := form(content(rank)), 1)
        assert torch.equal(tensor, content(1))
        dist.reduce(tensor := form(content(rank)), 1)
        assert torch.equal(tensor, total if rank == 1 else content(rank))
        parts = [form(torch.zeros(2, 3, 4, 5)) for _ in ranks]
        dist.all_gather(parts, form(content(rank)))
        assert all(torch.equal(part, content(r)) for r, part in enumerate(parts))
        parts = parts if rank == 0 else None
        dist.gather(form(content(rank + 1)), parts, dst=0)
        assert parts is None or all(torch.equal(p, content(r + 1)) for r, p in enumerate(parts))
        tensor = form(torch.zeros(2, 3, 4, 5))
        dist.scatter(tensor, [form(content(r)) for r in ranks] if rank == 0 else None, src=0)
        assert torch.equal(tensor, content(rank))
        tensor = form(torch.zeros(2, 3, 4, 5))
        dist.reduce_scatter(tensor, [form(content(rank + r)) for r in ranks])
        assert torch.equal(tensor, sum(content(r + rank) for r in ranks))
        inputs = [form(content(10 * rank + r)) for r in ranks]
        received = [form(torch.zeros(2, 3, 4, 5)) for _ in ranks]
        dist.all_to_all(received, inputs)
        assert all(torch.equal(part, content(10 * r + rank)) for r, part in enumerate(received))
        after, before = (rank + 1) % size, (rank - 1) % size
        work = dist.isend(form(content(rank)), after)
        dist.recv(tensor := form(torch.zeros(2, 3, 4, 5)), before)
        work.wait()
        assert torch.equal(tensor, content(before))
    # Inputs may be expanded: they are only read.
    parts = [torch.zeros(4) for _ in ranks]
    dist.all_gather(parts, torch.tensor([float(rank)]).expand(4))
    assert [part.tolist() for part in parts] == [[float(r)] * 4 for r in ranks]
    return True


@LAYOUTS
def test_tensors_of_any_dense_form_are_accepted(layout):
    assert all(values(run(forms, layout, deadline_seconds=100.0)))


def like_gloo(rank, size):
    """With equal strides on all ranks the result is the same as Gloo's."""
    gloo = dist.new_group(backend="gloo")
    for name in ("channels_last", "transposed"):
        by_hfreduce, by_gloo = (FORMS[name](content(rank)) for _ in range(2))
        dist.all_reduce(by_hfreduce)
        dist.all_reduce(by_gloo, group=gloo)
        assert torch.equal(by_hfreduce, by_gloo), name
    return True


def test_dense_tensors_are_reduced_as_by_gloo():
    assert all(values(run(like_gloo, ONE_NODE, deadline_seconds=100.0)))


def aliases(rank, size):
    """Outputs that overlap the input, or each other."""
    outputs = [torch.full((1000,), -1.0) for _ in range(size)]
    outputs[0].fill_(float(rank))
    dist.all_gather(outputs, outputs[0])
    assert [each.unique().tolist() for each in outputs] == [[float(r)] for r in range(size)]
    outputs = [torch.full((1000,), -1.0) for _ in range(size)]
    outputs[rank].fill_(float(rank))
    dist.all_gather(outputs, outputs[rank])
    assert [each.unique().tolist() for each in outputs] == [[float(r)] for r in range(size)]
    once = torch.full((1000,), -1.0)
    dist.all_gather([once] * size, torch.full((1000,), float(rank)))
    assert len(once.unique()) == 1
    both = [torch.full((1000,), 10.0 * rank + r) for r in range(size)]
    dist.all_to_all(both, both)
    assert [each.unique().tolist() for each in both] == [[10.0 * r + rank] for r in range(size)]
    return True


@LAYOUTS
def test_outputs_may_overlap_the_input(layout):
    assert all(values(run(aliases, layout)))


def uneven(rank, size):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):
        pieces = [content(rank + piece, (piece, 3)) for piece in range(size)]
        output = torch.full((rank, 3), -1.0)
        dist.reduce_scatter(output, pieces, op=op)
        stack = torch.stack([content(r + rank, (rank, 3)) for r in range(size)])
        expected = {dist.ReduceOp.SUM: stack.sum(0), dist.ReduceOp.MAX: stack.amax(0)}.get(op)
        expected = stack.sum(0) / 2 if expected is None else expected
        assert torch.equal(output, expected), op
        assert torch.equal(pieces[rank], content(2 * rank, (rank, 3)))
    return True


@LAYOUTS
def test_pieces_of_a_reduce_scatter_may_differ_in_size(layout):
    assert all(values(run(uneven, layout)))


def factors(rank, size):
    """Each rank's factor is applied before the sum, a number or a tensor; inputs do not change."""
    total = sum((r + 1) * content(r) for r in range(size))
    for factor in (float(rank + 1), torch.tensor([rank + 1.0])):
        op = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(tensor := content(rank), op)
        assert torch.equal(tensor, total)
        dist.reduce(tensor := content(rank), 0, op)
        assert torch.equal(tensor, total if rank == 0 else content(rank))
        whole = torch.cat([content(rank).flatten()] * size)
        dist.reduce_scatter_tensor(share := torch.zeros(120), whole, op)
        assert torch.equal(share, total.flatten())
        assert torch.equal(whole, torch.cat([content(rank).flatten()] * size))
        dist.reduce_scatter(share := torch.zeros(2, 3, 4, 5), [content(rank)] * size, op)
        assert torch.equal(share, total)
    return True


@LAYOUTS
def test_a_sum_with_factors(layout):
    assert all(values(run(factors, layout)))


def other_roots(rank, size, name):
    """Every rank names itself as the root; of a broadcast two do, and one waits for the second."""
    tensor = torch.ones(100)
    calls = {
        "broadcast": lambda: dist.broadcast(tensor, min(rank, 1)),
        "reduce": lambda: dist.reduce(tensor, rank),
        "gather": lambda: dist.gather(tensor, [torch.ones(100) for _ in range(size)], dst=rank),
        "scatter": lambda: dist.scatter(tensor, [torch.ones(100)] * size, src=rank),
    }
    try:
        calls[name]()
        # The root of a broadcast does not wait: its next operation raises the error.
        dist.barrier()
    except CollectiveError as error:
        return error.kind, str(error)
    return None, "no error"


@LAYOUTS
@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_different_roots_are_an_error_that_names_them(layout, name):
    for kind, text in values(run(other_roots, layout, name)):
        assert kind == "mismatch", text
        assert "root" in text, text

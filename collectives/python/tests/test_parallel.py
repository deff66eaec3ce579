"""torch features over collectives: FSDP2, functional collectives, meshes, coalescing, objects."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hfreduce import CollectiveError
from hfreduce.compat import IS_BACKEND
from hfreduce.testing import Layout, run, values
from torch import nn

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120, func_only=True)]

LAYOUT = Layout.two_zones(2, 1)
RANKS = LAYOUT.world_size


@pytest.fixture(scope="module", autouse=True)
def _server():
    """Imports torch, which takes a minute from a cold disk and should not count for a test."""
    run(nothing, Layout.one_node(1), backend=None, deadline_seconds=110)


def nothing(rank, size):
    return rank


def shard_and_train(rank, size, kind):
    """Four steps of a small network, its parameters sharded as FSDP2 does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    # Sizes that four ranks do not divide: shards are padded, and some are empty.
    model = nn.Sequential(nn.Linear(33, 50), nn.Tanh(), nn.Linear(50, 3))
    shape, names = ((2, 2), ("replicate", "shard")) if kind == "hybrid" else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if kind == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 33, generator=data)).float().square().mean().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    whole = [parameter.full_tensor().flatten() for parameter in model.parameters()]
    return torch.cat(whole).tolist(), float(total.full_tensor())


@pytest.mark.parametrize("kind", ["flat", "hybrid", "bf16"])
def test_fsdp2_equals_gloo_within_rounding(kind):
    hfreduce_values = values(run(shard_and_train, LAYOUT, kind, deadline_seconds=100))
    gloo = values(run(shard_and_train, LAYOUT, kind, backend="gloo", deadline_seconds=100))
    assert all(result == hfreduce_values[0] for result in hfreduce_values), "ranks differ"
    for actual, expected in zip(hfreduce_values[0], gloo[0], strict=True):
        torch.testing.assert_close(
            torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-5
        )


def functional(rank, size):
    """All of them, on the group and on a mesh, whole and coalesced; also through autograd."""
    import torch.distributed._functional_collectives as fc

    warnings.simplefilter("ignore", FutureWarning)
    group = dist.group.WORLD
    own = torch.arange(8.0) + rank
    inputs = torch.stack([torch.arange(8.0) + r for r in range(size)])

    def same(tensor, expected):
        torch.testing.assert_close(fc.wait_tensor(tensor), expected, rtol=0, atol=0)

    same(fc.all_reduce(own, "sum", group), inputs.sum(0))
    same(fc.all_reduce(own, "max", group), inputs.amax(0))
    same(fc.all_reduce(own, "avg", group), inputs.mean(0))
    for output, factor in zip(
        fc.all_reduce_coalesced([own, own * 2], "sum", group), (1, 2), strict=True
    ):
        same(output, inputs.sum(0) * factor)
    same(fc.broadcast(own, 1, group), inputs[1])
    same(fc.all_gather_tensor(own, 0, group), inputs.flatten())
    # Along another dimension than the first: torch joins the pieces.
    same(fc.all_gather_tensor(own.view(4, 2), 1, group), torch.cat(
        [each.view(4, 2) for each in inputs], dim=1))  # fmt: skip
    first, second = fc.all_gather_into_tensor_coalesced([own, own + 1], group)
    same(first, inputs.flatten())
    same(second, inputs.flatten() + 1)
    whole = inputs.sum(0)
    same(fc.reduce_scatter_tensor(own, "sum", 0, group), whole.chunk(size)[rank])
    first, second = fc.reduce_scatter_tensor_coalesced([own, own * 2], "sum", [0, 0], group)
    same(first, whole.chunk(size)[rank])
    same(second, whole.chunk(size)[rank] * 2)
    same(
        fc.all_to_all_single(own, None, None, group),
        torch.cat([each.chunk(size)[rank] for each in inputs]),
    )
    # Uneven: rank r sends r + 1 elements to every rank. Gloo refuses this.
    counts, expected = [rank + 1] * size, [r + 1 for r in range(size)]
    output = fc.all_to_all_single(torch.full((sum(counts),), float(rank)), expected, counts, group)
    same(output, torch.cat([torch.full((r + 1,), float(r)) for r in range(size)]))
    output = fc.permute_tensor(own, [(r + 1) % size for r in range(size)], group)
    same(output, inputs[(rank - 1) % size])
    if not IS_BACKEND:  # older versions of torch refuse the strides of this gradient
        return True
    leaf = own.clone().requires_grad_()
    fc.all_gather_tensor_autograd(leaf, 0, group).sum().backward()
    assert leaf.grad.eq(size).all(), leaf.grad
    return True


def coalesced(rank, size):
    """torch's coalescing, after which the group continues as before."""
    ones = [torch.full((n,), float(rank)) for n in (3, 70_001, 0)]
    with dist._coalescing_manager():
        for tensor in ones:
            dist.all_reduce(tensor)
    assert all(tensor.eq(sum(range(size))).all() for tensor in ones)
    sizes = (2, 70_001, 0, 5)
    packed = torch.split(torch.arange(sum(sizes)) + 1e6 * rank, sizes)
    for own in (packed, [each.clone() for each in packed]):
        outputs = [torch.empty(size * n) for n in sizes]
        with dist._coalescing_manager(async_ops=True) as manager:
            for output, each in zip(outputs, own, strict=True):
                dist.all_gather_into_tensor(output, each)
        manager.wait()
        for output, each in zip(outputs, own, strict=True):
            assert output.equal(torch.cat([each + 1e6 * (r - rank) for r in range(size)]))
    shares = [torch.empty(n) for n in (2, 5)]
    with dist._coalescing_manager():
        for share, n in zip(shares, (2, 5), strict=True):
            dist.reduce_scatter_tensor(share, torch.ones(size * n))
    assert all(share.eq(size).all() for share in shares)
    after = torch.ones(2)
    dist.all_reduce(after)
    assert after.eq(size).all()
    return True


def objects(rank, size):
    """Python objects of unequal size, in all directions."""
    gathered = [None] * size if rank == 1 else None
    dist.gather_object({"rank": rank, "text": "x" * rank * 1000}, gathered, dst=1)
    if rank == 1:
        assert [len(each["text"]) for each in gathered] == [1000 * r for r in range(size)]
    objects = [f"of {rank}", None] if rank == 2 else [None, None]
    dist.broadcast_object_list(objects, src=2)
    assert objects == ["of 2", None]
    received = [None]
    dist.scatter_object_list(received, list(range(size)) if rank == 0 else None, src=0)
    assert received == [rank]
    if rank in (0, 1):
        box = [("from", 0)] if rank == 0 else [None]
        dist.send_object_list(box, 1) if rank == 0 else dist.recv_object_list(box, 0)
        assert box == [("from", 0)]
    return True


def groups(rank, size):
    """Groups of groups: by list, by mesh, nested, and split from one another."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, expected in (("inner", rank // 2 * 4 + 1), ("outer", rank % 2 * 2 + 2)):
        tensor = torch.tensor(rank)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == expected, (name, tensor)
    halves, _ = dist.new_subgroups(2)
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=halves)
    assert tensor.item() == rank // 2 * 2 + 1
    # torch names a split group by the process's number of groups, which must not differ here.
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    tensor = torch.tensor(rank)
    dist.all_reduce(tensor, group=half)
    assert tensor.item() == rank // 2 * 4 + 1
    # In another order than the world's, with point-to-point operations.
    turned = dist.new_group([3, 1], use_local_synchronization=True) if rank in (1, 3) else None
    if turned is not None:
        other = 4 - rank
        landing = torch.empty(3)
        calls = [
            dist.P2POp(dist.isend, torch.full((3,), float(rank)), other, turned),
            dist.P2POp(dist.irecv, landing, other, turned),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        assert landing.eq(other).all()
        dist.destroy_process_group(turned)
    dist.barrier()
    return True


@pytest.mark.parametrize("function", [functional, coalesced, objects, groups])
def test_torch_features_work(function):
    assert values(run(function, LAYOUT, deadline_seconds=100)) == [True] * RANKS


def watched(rank, size, wait_all_ranks):
    dist.all_reduce(torch.ones(3))
    dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=wait_all_ranks)
    if rank not in (1, 2):
        with pytest.raises(CollectiveError) as raised:
            dist.monitored_barrier(timeout=timedelta(seconds=5), wait_all_ranks=wait_all_ranks)
        error = raised.value
        assert (error.kind, error.operation) == ("timed_out", "monitored_barrier")
        assert ("Ranks 1, 2 failed" in str(error)) == wait_all_ranks, str(error)
        absent = error.absent
    else:
        absent = None
    # The group works as before.
    dist.all_reduce(total := torch.ones(3))
    assert total.eq(size).all()
    return absent


@pytest.mark.skipif(not IS_BACKEND, reason="older versions of torch support it only for Gloo")
@pytest.mark.parametrize(("wait_all_ranks", "absent"), [(False, (1,)), (True, (1, 2))])
def test_a_monitored_barrier_names_the_absent_ranks(wait_all_ranks, absent):
    outcomes = values(run(watched, LAYOUT, wait_all_ranks, deadline_seconds=100))
    assert outcomes == [absent, None, None, *[absent] * (RANKS - 3)]

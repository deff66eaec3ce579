"""haiscale.clip: one norm over all axes, with the same bits in every layout of stages."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from haiscale.clip import clip_grad_norm, grad_norm
from hfreduce.testing import Layout, run, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

pytestmark = pytest.mark.torch


def parameters(count=7):
    """Parameters with gradients of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    named = []
    for k in range(count):
        p = torch.nn.Parameter(torch.zeros(4 * (k + 1), 8))
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (k - 3)
        named.append((f"layer.{k}", p))
    return named


def module_of(named):
    """A module with these parameters, in this order; names without their dots."""
    module = torch.nn.Module()
    for name, p in named:
        module.register_parameter(name.replace(".", "_"), p)
    return module


def norm_of(named, **options):
    return grad_norm(module_of(named), **options)


def test_it_clips_as_torch_does():
    ours, torchs = parameters(), parameters()
    norm = clip_grad_norm(module_of(ours), 0.5)
    expected = torch.nn.utils.clip_grad_norm_([p for _, p in torchs], 0.5)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for (_, p), (_, q) in zip(ours, torchs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_small_gradients_keep_their_bits():
    named = parameters(3)
    before = [p.grad.clone() for _, p in named]
    clip_grad_norm(module_of(named), 1e9)
    assert all(torch.equal(p.grad, b) for (_, p), b in zip(named, before, strict=True))


def test_the_norm_does_not_depend_on_the_order():
    named = parameters(40)
    norms = set()
    for seed in range(20):
        random.Random(seed).shuffle(named)
        norms.add(norm_of(named))
    assert len(norms) == 1


def test_shared_parameters_copies_and_missing_gradients_count_as_they_should():
    named = parameters(3)
    shared = [*named, ("other.name", named[0][1])]
    assert norm_of(shared) == norm_of(named)
    assert norm_of(named, copies={"layer_2"}) == norm_of(named[:2])
    named[2][1].grad = None
    assert norm_of(named) == norm_of(named[:2])
    assert norm_of([]) == 0


def test_infinite_and_missing_numbers_are_reported():
    named = parameters(3)
    named[1][1].grad[0, 0] = math.inf
    assert clip_grad_norm(module_of(named), 1.0) == math.inf
    named = parameters(3)
    named[1][1].grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="no gradient was changed"):
        clip_grad_norm(module_of(named), 1.0, error_if_nonfinite=True)
    assert torch.isfinite(named[0][1].grad).all()
    assert math.isnan(clip_grad_norm(module_of(named), 1.0))
    assert torch.isnan(named[0][1].grad).all()
    for invalid in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            clip_grad_norm(module_of(named), invalid)


def over_axes(rank, size):
    """Norms with parameters spread over stages, and with shards over two axes."""
    whole = parameters()
    # Stages of different sizes; the last rank has nothing.
    parts = [whole[:1], whole[1:5], whole[5:], []]
    stages = [norm_of(parts[rank], pipeline=dist.group.WORLD) for _ in range(3)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    layouts = {
        "both": (Shard(0), Shard(1)), "one": (Shard(0), Replicate()),
        "none": (Replicate(), Replicate()),
    }  # fmt: skip
    norms = {}
    for name, placements in layouts.items():
        sharded = []
        for each, p in whole:
            own = torch.nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
            own.grad = distribute_tensor(p.grad, mesh, placements)
            sharded.append((each, own))
        norms[name] = norm_of(sharded)
        clip_grad_norm(module_of(sharded), 0.5)
        norms[f"{name} clipped"] = norm_of(sharded)
    return stages, norms


def divided_twice(rank, size):
    """Norm of layers whose rows are divided over tp and again over shards, and of whole layers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    norms = []
    for divides in (False, True):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
        if divides:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["shard"])
        model(torch.ones(3, 8)).square().sum().backward()
        norms.append(grad_norm(model))
    return norms


def test_a_dimension_may_be_divided_over_two_axes():
    for whole, divided in values(run(divided_twice, Layout.one_node(4))):
        assert divided == pytest.approx(whole, rel=1e-6)


def test_the_norm_is_that_of_the_whole_model():
    expected = norm_of(parameters())
    outcomes = values(run(over_axes, Layout.one_node(4)))
    for stages, norms in outcomes:
        assert stages == [expected] * 3
        assert norms["none"] == expected
        for name in ("both", "one"):
            assert norms[name] == pytest.approx(expected, rel=1e-7)
            assert norms[f"{name} clipped"] == pytest.approx(0.5, rel=1e-4)
    assert outcomes[0] == outcomes[1] == outcomes[2] == outcomes[3]

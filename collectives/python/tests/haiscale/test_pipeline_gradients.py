"""haiscale.pipeline: gradients and their norm where stages differ from plain blocks."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale import mesh, moe
from haiscale.clip import grad_norm
from haiscale.pipeline.actions import Kind
from haiscale.pipeline.module import Pipeline
from haiscale.placement import Sizes
from hfreduce.testing import Layout, run, values
from torch import nn
from torch.distributed.pipelining import PipelineStage

sys.path.insert(0, str(Path(__file__).parent))
import pipelines

pytestmark = pytest.mark.torch

STABLE = {"HFREDUCE_DETERMINISM": "stable"}
MICROBATCHES, WIDTH = 4, 6


def loss_fn(output, target):
    return (output - target).square().mean()


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Pair(nn.Module):
    """Its second output does not depend on its input; `is_shared`: its weight is that of both."""

    def __init__(self, is_shared):
        super().__init__()
        self.inner = linear()
        self.side = self.inner.weight if is_shared else nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.inner(x), self.side.square() * 0.5


class Join(nn.Module):
    """Adds two inputs."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x, y):
        return self.inner(x) + y.square().sum()


class Sum(nn.Module):
    """The gradient of its input is expanded: all rows share the memory of one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x.sum(0) * self.inner


class Expand(nn.Module):
    """Its output is expanded."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return self.inner(x.mean(0)).expand(3, WIDTH)


def expanded():
    torch.manual_seed(3)
    return {"a": linear(), "b": Sum()}


def expanded_twice():
    torch.manual_seed(3)
    return {"a": Expand(), "b": Sum()}


def frozen_first():
    """The second stage has no input that requires a gradient."""
    torch.manual_seed(3)
    layers = {name: linear() for name in "abcd"}
    layers["a"].requires_grad_(False)
    return layers


def apart_from_the_input():
    torch.manual_seed(3)
    return {"a": linear(), "b": Pair(is_shared=False), "c": Join(), "d": linear()}


def partly_apart_from_the_input():
    torch.manual_seed(3)
    return {"a": linear(), "b": linear(), "c": Pair(is_shared=True), "d": Join()}


def tied_in_two_orders():
    """The second rank has x.q, y.c, x.d: c is the first name of a's copy, d that of the tree."""
    torch.manual_seed(3)
    layers = {name: linear() for name in ("m.a", "m.b", "x.q", "y.c", "x.d")}
    layers["y.c"].weight = layers["x.d"].weight = layers["m.a"].weight
    return layers


def compared(rank, size, schedule, make, split=None):
    """Names whose gradients differ from those of one process, and both norms."""
    layers = make()
    whole = copy.deepcopy(nn.ModuleList(layers.values()))
    named = dict(zip(layers, whole, strict=True))
    inputs = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
    for part in inputs.split(2):
        value = part
        for layer in whole:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        (loss_fn(value, part) * (1 / MICROBATCHES)).backward()
    pipeline = Pipeline(
        layers, pipelines.schedule_of(schedule, size, MICROBATCHES), loss_fn, split=split
    )
    pipeline.step(inputs, inputs)
    differing = []
    for name, layer in named.items():
        for inner, expected in layer.named_parameters():
            own = dict(pipeline.module.named_parameters()).get(f"{name}.{inner}")
            if own is None:
                continue
            if own.grad is None or expected.grad is None:
                same = own.grad is expected.grad
            else:
                same = torch.equal(own.grad, expected.grad)
            if not same:
                differing.append(f"{name}.{inner}")
    return differing, pipeline.clip_grad_norm_(1e9), grad_norm(whole)


def test_a_tied_parameter_counts_once_whatever_its_name():
    for _, norm, expected in values(
        run(compared, Layout.one_node(2), "1F1B", tied_in_two_orders, [2, 3])
    ):
        assert norm == pytest.approx(expected, rel=1e-5)


def with_experts(rank, size, on_several_ranks):
    """Averages a layer with experts over two replicas; reports the error, or equal experts."""
    links = moe.connect(mesh.build(Sizes(dp=size, ep=size))) if on_several_ranks else None
    own = [dist.new_group([each]) for each in range(size)][rank]
    torch.manual_seed(rank)
    layer = moe.MoE(WIDTH, 8, 4, moe.Routing(top_k=2), links=links, name="blocks.3.moe")
    before = layer.experts.gate.detach().clone()
    schedule = pipelines.schedule_of("1F1B", 1, MICROBATCHES)
    try:
        Pipeline({"moe": layer}, schedule, loss_fn, group=own, data_group=dist.group.WORLD)
    except ValueError as error:
        return str(error), torch.equal(layer.experts.gate, before)
    return "built", torch.equal(layer.experts.gate, before)


def test_replicas_with_different_experts_are_refused():
    for text, same in values(run(with_experts, Layout.one_node(2), True)):
        assert "layer 'blocks.3.moe' are on 2 ranks" in text
        assert "pass no data_group, and call haiscale.moe.average_gradients" in text
        assert same


def test_replicas_with_all_experts_are_averaged():
    results = values(run(with_experts, Layout.one_node(2), False))
    assert results == [("built", True), ("built", False)]


@pytest.mark.parametrize("make", [expanded, expanded_twice])
def test_expanded_tensors_pass_between_stages(make):
    for differing, norm, expected in values(
        run(compared, Layout.one_node(2), "1F1B", make, environment=STABLE)
    ):
        assert differing == []
        assert norm == expected


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "csv", "Interleaved1F1B"])
@pytest.mark.parametrize("make", [frozen_first, apart_from_the_input, partly_apart_from_the_input])
def test_split_backward_passes_find_all_gradients(schedule, make):
    for differing, norm, expected in values(
        run(compared, Layout.one_node(2), schedule, make, environment=STABLE)
    ):
        assert differing == []
        assert norm == expected


def split_passes(rank, size, make):
    """Second parts of split backward passes: those of torch, and those of the schedule."""
    found = []
    theirs = PipelineStage.backward_weight_one_chunk
    PipelineStage.backward_weight_one_chunk = lambda *args, **kwargs: (
        found.append(args[1]), theirs(*args, **kwargs),
    )  # fmt: skip
    schedule = pipelines.schedule_of("ZBVZeroBubble", size, MICROBATCHES)
    inputs = torch.ones(2 * MICROBATCHES, WIDTH)
    Pipeline(make(), schedule, loss_fn).step(inputs, inputs)
    return len(found), sum(action.kind is Kind.WEIGHT for action in schedule.ranks[rank])


def plain():
    return {name: linear() for name in "abcd"}


def test_backward_passes_of_plain_stages_stay_split():
    for found, expected in values(run(split_passes, Layout.one_node(2), plain)):
        assert found == expected > 0
